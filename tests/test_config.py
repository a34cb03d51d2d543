"""The configuration: what is read, what overrides it, and what is refused with which words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxd.config import Settings, cache_dir, etag, load
from mlxd.config.environment import leaves
from mlxd.config.settings import (
    AdminSettings,
    LogSettings,
    MetricsSettings,
    ModelSettings,
    ServerSettings,
    TracesSettings,
)
from mlxd.errors import ConfigError
from mlxd.policy import TRAITS

ETC = Path(__file__).parent.parent / "etc"
MINIMAL = '[models.tiny]\nsource = "owner/tiny"\n'

Load = Callable[..., Settings]
Problems = Callable[..., list[str]]


@pytest.fixture
def read(tmp_path: Path) -> Load:
    """Load a text as mlxd.toml."""

    def read_text(text: str = MINIMAL, environ: Mapping[str, str] | None = None) -> Settings:
        file = tmp_path / "mlxd.toml"
        file.write_text(text)
        return load(file, environ or {})

    return read_text


@pytest.fixture
def problems(read: Load, tmp_path: Path) -> Problems:
    """What is wrong with a text, the temporary folder left out."""

    def find(text: str = MINIMAL, environ: Mapping[str, str] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            read(text, environ)
        return [problem.replace(f"{tmp_path}/", "") for problem in refused.value.problems]

    return find


class TestShippedFiles:
    """The files in etc/."""

    def test_the_annotated_file_is_the_defaults(self) -> None:
        """etc/mlxd.toml runs as it is, and what it spells out is what is true without it."""
        settings = load(ETC / "mlxd.toml", {})

        assert list(settings.models) == ["smollm2-135m"]
        assert settings.server == ServerSettings()
        assert settings.models["smollm2-135m"] == ModelSettings(
            source="starter:smollm2-135m-instruct", aliases=("default",)
        )

    def test_the_strict_file_sends_what_sets_a_request_apart_to_the_serial_lane(self) -> None:
        """etc/mlxd.strict.toml expresses the policy of the systems that mlxd grew from."""
        policy = load(ETC / "mlxd.strict.toml", {}).models["smollm2-135m"].policy

        assert policy.model_fields_set == set(TRAITS), "every trait is told"
        serial = {trait for trait, answer in policy.model_dump().items() if answer == "serial"}
        assert serial == {
            *("seed", "penalties", "adapter", "images", "kv_quant"),
            "draft",  # mlxd's own default
        }

    def test_every_key_stands_in_the_annotated_file(self) -> None:
        """A key that exists can be found in etc/mlxd.toml, set or behind a "#"."""
        text = (ETC / "mlxd.toml").read_text()
        keys = [
            keys[-1]
            for table in (
                *(ServerSettings, AdminSettings, MetricsSettings),
                *(TracesSettings, LogSettings, ModelSettings),
            )
            for keys, _ in leaves(table)
        ]

        missing = [key for key in keys if not re.search(rf"^(# )?{key} = ", text, re.MULTILINE)]
        assert missing == []
        assert len(keys) > 30


class TestValues:
    """What texts mean."""

    def test_durations_and_sizes_carry_their_units(self, read: Load) -> None:
        """Durations become seconds and sizes become bytes, binary and decimal ones told apart."""
        server = read(
            '[server]\ndrain_timeout = "250ms"\nrequest_timeout = "1h30m"\n'
            f'max_body = "500MB"\nsse_keepalive = "off"\n{MINIMAL}'
        ).server

        assert server.drain_timeout == 0.25
        assert server.request_timeout == 5400
        assert server.max_body == 500_000_000
        assert server.sse_keepalive is None

    def test_relative_paths_start_at_the_files_folder(self, read: Load, tmp_path: Path) -> None:
        """A service manager's working directory changes nothing."""
        settings = read(
            '[server]\ncache_dir = "cache"\nlisten = "unix:run/s"\n'
            '[models.a]\nsource = "./a"\n[models.b]\nsource = "b/c.gguf"\n'
        )

        assert settings.server.cache_dir == str(tmp_path / "cache")
        assert settings.server.listen == f"unix:{tmp_path}/run/s"
        assert settings.models["a"].source == str(tmp_path / "a")
        assert settings.models["b"].source == str(tmp_path / "b/c.gguf")

    def test_a_home_folder_is_expanded(self, read: Load) -> None:
        """`~` works in the file as it does in a shell."""
        source = read('[models.a]\nsource = "~/models/a"\n').models["a"].source

        assert source == str(Path.home() / "models/a")

    def test_defaults_lie_under_every_models_own_keys(self, read: Load) -> None:
        """A model's own key wins over [defaults], which wins over what is built in."""
        models = read(
            "[defaults.batch]\nwidth = 4\nqueue = 9\n[defaults.sampling]\ntop_k = 5\n"
            '[models.a]\nsource = "o/a"\n[models.b]\nsource = "o/b"\nbatch.width = 2\n'
        ).models

        assert (models["a"].batch.width, models["a"].batch.queue) == (4, 9)
        assert (models["b"].batch.width, models["b"].batch.queue) == (2, 9)
        assert models["a"].sampling.top_k == 5

    @pytest.mark.parametrize("bits", [0, 8, 4])
    def test_kv_bits_are_those_that_the_engine_has(self, read: Load, bits: int) -> None:
        """From the file or a variable."""
        name = "MLXD_MODELS__TINY__BATCH__KV_BITS"

        assert read().models["tiny"].batch.kv_bits == 0
        assert read(f"{MINIMAL}batch.kv_bits = {bits}\n").models["tiny"].batch.kv_bits == bits
        assert read(MINIMAL, {name: str(bits)}).models["tiny"].batch.kv_bits == bits

    @pytest.mark.parametrize("value", ["2", "16", "-8", "8.0", "true", "false", '"8"'])
    def test_other_kv_bits_are_refused_by_name(self, problems: Problems, value: str) -> None:
        """Nothing near them is taken for them."""
        (problem,) = problems(f"{MINIMAL}batch.kv_bits = {value}\n")

        assert "models.tiny.batch.kv_bits" in problem
        assert "0, 8 or 4" in problem

    def test_an_answer_written_in_the_file_is_known_from_a_default(self, read: Load) -> None:
        """Only a "batch" that somebody wrote is worth a warning when it cannot be had."""
        policy = read(f'[defaults.policy]\nseed = "batch"\n{MINIMAL}').models["tiny"].policy

        assert policy.model_fields_set == {"seed"}

    def test_equal_configurations_are_equal_and_have_one_etag(self, read: Load) -> None:
        """Comments and defaults that are spelled out make no difference; a changed key does."""
        plain, spelled = read(), read(f"# hello\n[server]\nhosts = []\n{MINIMAL}")
        changed = read(f"[defaults.batch]\nwidth = 3\n{MINIMAL}")

        assert plain == spelled
        assert etag(plain) == etag(spelled) != etag(changed)

    def test_settings_cannot_be_changed(self, read: Load) -> None:
        """A snapshot stays what was read."""
        with pytest.raises(ValueError, match="frozen"):
            read().server.listen = "x"  # type: ignore[misc]


class TestEnvironment:
    """Variables over the file."""

    def test_a_variable_overrides_each_kind_of_key(self, read: Load) -> None:
        """Text stays text, and everything else is read as its key's type."""
        settings = read(
            f"[log]\nlevel = 'debug'\n{MINIMAL}env = {{ A = '1' }}\n",
            {
                "MLXD_SERVER__LISTEN": "localhost:9",
                "MLXD_SERVER__DRAIN_TIMEOUT": "5m",
                "MLXD_SERVER__HOSTS": '["a.example"]',
                "MLXD_LOG__LEVEL": "error",
                "MLXD_DEFAULTS__BATCH__QUEUE": "3",
                "MLXD_MODELS__TINY__BATCH__WIDTH": "7",
                "MLXD_MODELS__TINY__SAMPLING__TOP_P": "0.5",
                "MLXD_MODELS__TINY__TRUST_REMOTE_CODE": "true",
                "MLXD_MODELS__TINY__ENV": '{"B": "2"}',
            },
        )

        tiny = settings.models["tiny"]
        assert settings.server.listen == "localhost:9"
        assert settings.server.drain_timeout == 300
        assert settings.server.hosts == ("a.example",)
        assert settings.log.level == "error"
        assert (tiny.batch.width, tiny.batch.queue) == (7, 3)
        assert tiny.sampling.top_p == 0.5
        assert tiny.trust_remote_code is True
        assert tiny.env == {"B": "2"}  # replaced, not merged

    def test_a_text_that_looks_like_a_number_stays_a_text(self, read: Load) -> None:
        """A key of text takes its variable as it is."""
        source = read(environ={"MLXD_SERVER__CACHE_DIR": "/1"}).server.cache_dir

        assert source == "/1"

    def test_ids_are_matched_against_the_files(self, read: Load) -> None:
        """`.` and `-` of an id are `_` in a variable's name, and no second model comes of it."""
        models = read(
            '[models."qwen2.5-7b"]\nsource = "o/q"\n',
            {"MLXD_MODELS__QWEN2_5_7B__BATCH__WIDTH": "2"},
        ).models

        assert list(models) == ["qwen2.5-7b"]
        assert models["qwen2.5-7b"].batch.width == 2

    def test_whole_models_come_as_json(self, read: Load) -> None:
        """MLXD_MODELS replaces and adds whole tables, and single keys still lie over them."""
        models = read(
            f"{MINIMAL}batch.width = 3\nbatch.queue = 3\n",
            {
                "MLXD_MODELS": '{"tiny": {"source": "o/t"}, "b.c": {"source": "o/b"}}',
                "MLXD_MODELS__B_C__BATCH__WIDTH": "5",
            },
        ).models

        assert models["tiny"] == ModelSettings(source="o/t")
        assert models["b.c"].batch.width == 5

    def test_internal_variables_and_the_files_own_are_no_keys(self, read: Load) -> None:
        """`_MLXD_*` is nobody's business, and MLXD_CONFIG has been used by then."""
        settings = read(environ={"_MLXD_X": "1", "MLXD_CONFIG": "/x", "mlxd_x": "1"})

        assert list(settings.models) == ["tiny"]

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("MLXD_SERVER__LISTNE", "unknown variable; expected one such as MLXD_SERVER__LISTEN"),
            ("MLXD_server__listen", "unknown variable"),
            ("MLXD_SERVER", "names a table; expected one of its keys"),
            ("MLXD_MODELS__TINY", "names a table; expected one of its keys"),
            ("MLXD_MODELS__OTHER__SOURCE", "unknown variable"),
            ("MLXD_MODELS__TINY__ENV__PATH", "unknown variable"),
        ],
    )
    def test_unknown_variables_are_refused(self, problems: Problems, name: str, told: str) -> None:
        """A variable that sets nothing is a mistake that would go unnoticed."""
        (problem,) = problems(environ={name: "x"})

        assert problem.startswith(f"{name}: {told}")

    def test_ids_that_collide_cannot_be_named(self, problems: Problems) -> None:
        """Two ids with one spelling are set in the file or through MLXD_MODELS."""
        (problem,) = problems(
            '[models."a.b"]\nsource = "o/a"\n[models.a-b]\nsource = "o/b"\n',
            {"MLXD_MODELS__A_B__DTYPE": "float32"},
        )

        assert "a-b and a.b have the same name" in problem
        assert "MLXD_MODELS" in problem

    def test_ids_with_the_separator_cannot_be_named(self, problems: Problems) -> None:
        """An id such as a-.b would look like two segments."""
        (problem,) = problems(
            '[models."a-.b"]\nsource = "o/a"\n', {"MLXD_MODELS__A__B__DTYPE": "float32"}
        )

        assert "has the separator in it" in problem

    @pytest.mark.parametrize("text", ["{", "[]", "3"])
    def test_models_must_be_an_object(self, problems: Problems, text: str) -> None:
        """MLXD_MODELS that is no JSON object says what it should be."""
        (problem,) = problems(environ={"MLXD_MODELS": text})

        assert problem.startswith("MLXD_MODELS: expected a JSON object")

    def test_a_wrong_value_names_its_variable(self, problems: Problems) -> None:
        """The place to correct it is the variable, not the file's line."""
        assert problems(
            f"{MINIMAL}batch.width = 3\n", {"MLXD_MODELS__TINY__BATCH__WIDTH": "x"}
        ) == [
            (
                "MLXD_MODELS__TINY__BATCH__WIDTH: models.tiny.batch.width: "
                'expected a valid integer, got "x"'
            )
        ]


class TestAccess:
    """Keys, the token, and when a daemon may be open."""

    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path) -> None:
        """A file of keys and one of the token."""
        (tmp_path / "keys").write_text("# the team\nalice:sk-a:2:5\n\nbob:sk-b\nci:sk-c:0.5\n")
        (tmp_path / "token").write_text("secret-token\n")

    def test_keys_have_names_weights_and_priorities(self, read: Load) -> None:
        """One a line, with comments; what is left out is ordinary."""
        keys = read(
            f'[server]\napi_keys_file = "keys"\n[admin]\ntoken_file = "token"\n{MINIMAL}'
        ).server.api_keys_file

        assert keys is not None
        assert [(key.name, key.weight, key.max_priority) for key in keys.keys] == [
            ("alice", 2.0, 5),
            ("bob", 1.0, 0),
            ("ci", 0.5, 0),
        ]

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "keys: expected name:key[:weight[:max_priority]], at least once"),
            ("# none\n", "keys: expected name:key"),
            ("alice:\n", "keys:1: the key is empty"),
            ("alice: \n", "keys:1: the key is empty"),
            ("alice\n", "keys:1: expected name:key"),
            (":hidden\n", "keys:1: expected a name"),
            ("a:hidden:1:2:3\n", "keys:1: expected name:key"),
            ("a:hid den\n", "keys:1: expected a key of printable ASCII"),
            ("a:hidden:0\n", "keys:1: expected a weight above 0"),
            ("a:hidden:nan\n", "keys:1: expected a weight above 0"),
            ("a:hidden:-1\n", "keys:1: expected a weight above 0"),
            ("a:hidden:1:-1\n", "keys:1: expected a highest priority"),
            ("a:hidden:1:x\n", "keys:1: expected a highest priority"),
            ("a:hidden\na:hidden2\n", "keys: the name a stands there twice"),
            ("a:hidden\nb:hidden\n", "keys: a and b have the same key"),
        ],
    )
    def test_a_wrong_file_of_keys_is_refused(
        self, problems: Problems, tmp_path: Path, text: str, told: str
    ) -> None:
        """By its line and rule, and without a word of any key."""
        (tmp_path / "keys").write_text(text)

        (problem,) = problems(f'{MINIMAL}[server]\napi_keys_file = "keys"\n')

        assert problem.startswith("mlxd.toml:4: server.api_keys_file: ")
        assert told in problem
        assert "hid" not in problem

    @pytest.mark.parametrize("listen", ["0.0.0.0:8080", "[::]:8080", "studio.lan:8080"])
    def test_the_network_needs_keys_and_a_token(self, problems: Problems, listen: str) -> None:
        """No daemon is open to others by a forgotten line."""
        keys, token = 'api_keys_file = "keys"\n', '[admin]\ntoken_file = "token"\n'
        server = f'{MINIMAL}[server]\nlisten = "{listen}"\n'

        (open_to_all,) = problems(server)
        assert "server.listen: expected a loopback address" in open_to_all
        (open_admin,) = problems(server + keys)
        assert "admin: expected token_file, or listen on a Unix socket" in open_admin
        (still_open,) = problems(server + token)
        assert "without api_keys_file every caller is trusted" in still_open

    @pytest.mark.parametrize(
        "text",
        [
            'server = {listen = "0.0.0.0:1", api_keys_file = "keys"}\nadmin.token_file = "token"\n',
            'server = {listen = "0.0.0.0:1", api_keys_file = "keys"}\nadmin.listen = "unix:a"\n',
            '[server]\nlisten = "localhost:1"\n[admin]\nlisten = "[::1]:2"\n',
            '[server]\nlisten = "unix:s"\n',
            '[admin]\nlisten = "0.0.0.0:2"\ntoken_file = "token"\n',
        ],
    )
    def test_guarded_listeners_are_accepted(self, read: Load, text: str) -> None:
        """Keys and a token, a private socket, or nobody but this machine."""
        assert list(read(text + MINIMAL).models) == ["tiny"]

    @pytest.mark.parametrize(
        "text",
        [
            '[admin]\nlisten = "0.0.0.0:2"\n',
            '[server]\napi_keys_file = "keys"\n[admin]\nlisten = "127.0.0.1:2"\n',
            '[server]\nlisten = "unix:s"\napi_keys_file = "keys"\n',
        ],
    )
    def test_an_open_admin_is_refused_where_anything_is_guarded(
        self, problems: Problems, text: str
    ) -> None:
        """Who may ask models may not operate them."""
        (problem,) = problems(text + MINIMAL)

        assert "admin: expected token_file" in problem

    def test_the_token_is_no_key(self, problems: Problems, tmp_path: Path) -> None:
        """Else every holder of that key would be an operator."""
        (tmp_path / "token").write_text("sk-b")

        (problem,) = problems(
            f'[server]\napi_keys_file = "keys"\n[admin]\ntoken_file = "token"\n{MINIMAL}'
        )

        assert "whose token is none of the API keys" in problem
        assert "sk-b" not in problem

    @pytest.mark.parametrize("text", ["", "\n", "two words", "two\nlines", "é"])
    def test_a_token_stands_alone(self, problems: Problems, tmp_path: Path, text: str) -> None:
        """An empty one would open everything."""
        (tmp_path / "token").write_text(text)

        (problem,) = problems(f'{MINIMAL}[admin]\ntoken_file = "token"\n')

        assert "mlxd.toml:4: admin.token_file: token: expected one token" in problem
        assert "two" not in problem

    def test_a_dump_shows_paths_alone(self, read: Load, tmp_path: Path) -> None:
        """What an operator is shown of the configuration holds no secret."""
        settings = read(
            f'[server]\napi_keys_file = "keys"\n[admin]\ntoken_file = "token"\n{MINIMAL}'
        )

        dump = settings.model_dump(mode="json")
        assert dump["server"]["api_keys_file"] == str(tmp_path / "keys")
        assert dump["admin"]["token_file"] == str(tmp_path / "token")
        assert not any(secret in repr(settings) for secret in ("sk-a", "sk-b", "secret-token"))

    def test_files_can_be_named_by_variables(self, read: Load, tmp_path: Path) -> None:
        """As every other key."""
        settings = read(
            environ={
                "MLXD_SERVER__API_KEYS_FILE": str(tmp_path / "keys"),
                "MLXD_ADMIN__TOKEN_FILE": str(tmp_path / "token"),
                "MLXD_METRICS__OPEN": "true",
            }
        )

        assert settings.server.api_keys_file is not None
        assert settings.admin.token_file is not None
        assert settings.metrics.open


class TestProblems:
    """What is refused, and how it is told."""

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("drain_timeout = 30", 'expected a duration such as "30s"'),
            ('drain_timeout = "30"', 'expected a duration such as "30s"'),
            ('drain_timeout = "-5s"', 'expected a duration such as "30s"'),
            ('request_timeout = "0s"', "expected a value greater than 0"),
            ('sse_keepalive = "never"', 'or "off", got "never"'),
            ("max_body = 5", 'expected a size such as "2GiB"'),
            ('max_body = "0B"', "expected a value greater than or equal to 1"),
            ('max_body = "5 bananas"', "expected a size"),
            ('hosts = "a"', 'expected an array, got "a"'),
            ('hosts = ["a b"]', "expected a host name"),
            ('origins = ["a.example"]', "expected an origin"),
            ('listen = "8080"', 'expected "host:port" or "unix:/path"'),
            ('listen = "127.0.0.1:65536"', 'expected "host:port" or "unix:/path"'),
            ('listen = "0.0.0.0:8080"', "expected a loopback address"),
            ('listen = "[::]:8080"', "expected a loopback address"),
            (f'listen = "unix:/{"x" * 100}"', "at most 100 bytes"),
            ("listen = 8080", "expected a valid string, got 8080"),
            ("lisetn = 1", "unknown key; did you mean listen?"),
            ("zzz = 1", "unknown key; expected one of api_keys_file, listen"),
            ('api_keys_file = "nowhere"', "nowhere: cannot be read: No such file"),
            ("api_keys_file = 1", "expected the path of a file"),
        ],
    )
    def test_server_keys(self, problems: Problems, line: str, told: str) -> None:
        """Each wrong value of [server] names its key, its line and what was expected."""
        (problem,) = problems(f"{MINIMAL}[server]\n{line}\n")

        assert problem.startswith(f"mlxd.toml:4: server.{line.partition(' ')[0]}")
        assert told in problem

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("batch.width = 0", "expected a value greater than or equal to 1, got 0"),
            ("batch.width = 4.0", "expected a valid integer, got 4.0"),
            ("batch.width = true", "expected a valid integer, got true"),
            ("batch = 3", "expected a table, got 3"),
            ('policy.seed = "maybe"', "expected 'batch', 'serial' or 'reject', got \"maybe\""),
            ("sampling.temperature = nan", "expected a finite number"),
            ("sampling.top_p = 0", "expected a value greater than 0"),
            ('dtype = "int8"', "expected 'auto', 'float32'"),
            ("context = 1", "expected a value greater than or equal to 16"),
            ("aliases = [3]", "expected a valid string, got 3"),
            ('aliases = ["a b"]', "expected a model name"),
            ('aliases = ["x", "x"]', "'x' already names tiny"),
            ('aliases = ["tiny"]', "'tiny' already names tiny"),
            ('trust_remote_code = "yes"', "expected a valid boolean"),
        ],
    )
    def test_model_keys(self, problems: Problems, line: str, told: str) -> None:
        """Each wrong value of a model names its key, its line and what was expected."""
        (problem,) = problems(f"{MINIMAL}{line}\n")

        assert problem.startswith(f"mlxd.toml:3: models.tiny.{line.partition(' ')[0]}")
        assert told in problem

    @pytest.mark.parametrize(
        "source", ["", "tiny", "starter:huge", "a/b/c", "http://x/y", "o/m@", "o/../m"]
    )
    def test_a_source_must_be_one(self, problems: Problems, source: str) -> None:
        """What is no folder, file, repository or starter is refused before anything is fetched."""
        (problem,) = problems(f'[models.a]\nsource = "{source}"\n')

        assert problem.startswith("mlxd.toml:2: models.a.source: expected")

    @pytest.mark.parametrize("model_id", ["Tiny", "-a", "a b", "a/b", ""])
    def test_a_model_id_must_be_one(self, problems: Problems, model_id: str) -> None:
        """Ids are what clients send and what variables are named after."""
        (problem,) = problems(f'[models."{model_id}"]\nsource = "o/a"\n')

        assert "expected a model id" in problem

    @pytest.mark.parametrize("text", ["", "[models]\n"])
    def test_there_must_be_a_model(self, problems: Problems, text: str) -> None:
        """A daemon that can serve nothing is not started."""
        (problem,) = problems(text)

        assert "expected at least one [models.ID] table" in problem

    def test_an_id_with_a_dot_must_be_quoted(self, problems: Problems) -> None:
        """The usual slip gets the line that is right."""
        found = problems('[models.qwen2.5-7b]\nsource = "o/q"\n')

        assert (
            "mlxd.toml:1: models.qwen2.5-7b: unknown table; "
            'an id with a dot is quoted: [models."qwen2.5-7b"]'
        ) in found

    def test_a_name_means_one_model(self, problems: Problems) -> None:
        """An alias may be neither another's id nor another's alias."""
        found = problems(
            '[models.a]\nsource = "o/a"\naliases = ["x", "b"]\n'
            '[models.b]\nsource = "o/b"\naliases = ["x"]\n'
        )

        assert found == [
            "mlxd.toml:3: models.a.aliases: 'b' already names b; expected names that are free",
            "mlxd.toml:6: models.b.aliases: 'x' already names a; expected names that are free",
        ]

    def test_a_wrong_default_is_told_once(self, problems: Problems) -> None:
        """What is wrong in [defaults] is not repeated for every model under it."""
        assert problems(
            '[models.a]\nsource = "o/a"\n[models.b]\nsource = "o/b"\n'
            "[defaults.batch]\nwidth = 0\n[defaults.nonsense]\n"
        ) == [
            "mlxd.toml:6: defaults.batch.width: expected a value greater than or equal to 1, got 0",
            "mlxd.toml:7: defaults.nonsense: unknown key; expected one of sampling, batch, policy",
        ]

    def test_all_problems_come_at_once_in_the_files_order(self, problems: Problems) -> None:
        """One run of `mlxd check` is enough, variables included."""
        found = problems(
            '[server]\nmax_bdy = 1\nlisten = "x"\n[models.a]\n[log]\nlevel = "loud"\n[extra]\n',
            {"MLXD_NO": "1", "MLXD_SERVER__MAX_BODY": "1"},
        )

        assert [problem.partition(": ")[0] for problem in found] == [
            "MLXD_SERVER__MAX_BODY",
            *(f"mlxd.toml:{line}" for line in (2, 3, 4, 6, 7)),
            "MLXD_NO",
        ]

    def test_values_of_env_are_not_repeated(self, problems: Problems) -> None:
        """They may be secrets, and problems go into logs and answers."""
        (problem,) = problems(f"{MINIMAL}env = {{ TOKEN = 1234 }}\n")

        assert "models.tiny.env.TOKEN" in problem
        assert "1234" not in problem

    def test_broken_toml_names_the_place(self, problems: Problems) -> None:
        """A syntax error has its line and column."""
        (problem,) = problems("[server\n")

        assert problem.startswith("mlxd.toml: expected TOML: ")
        assert "line 1" in problem

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        """A wrong path is not an empty configuration."""
        with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read: No such file"):
            load(tmp_path / "gone.toml", {})

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        """A path that cannot be read says why."""
        with pytest.raises(ConfigError, match="Is a directory"):
            load(tmp_path, {})

    def test_bytes_that_are_no_text_are_told(self, tmp_path: Path) -> None:
        """TOML is UTF-8."""
        file = tmp_path / "mlxd.toml"
        file.write_bytes(b"\xff")

        with pytest.raises(ConfigError, match="expected TOML"):
            load(file, {})


class TestCacheFolder:
    """Where fetched models go."""

    def test_a_folder_that_is_set_is_used(self) -> None:
        """`cache_dir` of the file wins."""
        assert cache_dir(ServerSettings(cache_dir="/x"), {}) == Path("/x")

    def test_linux_follows_xdg(self) -> None:
        """An XDG folder that is not absolute is ignored, as its specification wants."""
        server, home = ServerSettings(), Path.home()

        assert cache_dir(server, {"XDG_CACHE_HOME": "/c"}, "linux") == Path("/c/mlxd")
        assert cache_dir(server, {"XDG_CACHE_HOME": "c"}, "linux") == home / ".cache/mlxd"
        assert cache_dir(server, {}, "linux") == home / ".cache/mlxd"

    def test_macos_has_a_folder_of_its_own(self) -> None:
        """Caches are in ~/Library there."""
        assert cache_dir(ServerSettings(), {}, "darwin") == Path.home() / "Library/Caches/mlxd"
