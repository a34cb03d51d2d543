"""The HTTP interfaces: routes, schemas, streams, probes."""
