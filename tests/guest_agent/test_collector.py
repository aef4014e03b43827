"""The collector as the agent starts it: a real process, a real libnvidia-ml.so.1 (the fake), and what comes out of it."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest

from guest_agent import collector
from tests.fakes.nvml import SOURCE, build_fake_nvml, fake_nvml_environment

DEVICE_KEYS = [
    "index", "uuid", "pci_bus_id", "utilization_gpu", "utilization_memory", "memory_total_bytes", "memory_used_bytes",
    "memory_free_bytes", "temperature_c", "power_usage_mw", "errors",
]  # fmt: skip
RESPONSE_KEYS = ["gpus", "error", "cc_ready", "cc_enabled", "sample_age_ms"]
H200_MEMORY = 150754820096
ALL_ONES = 2**64 - 1

Run = Callable[..., subprocess.CompletedProcess[bytes]]
Sample = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Run:
    """Runs the collector on a machine as described by `control`, with the arguments `arguments`."""

    def run(
        control: str | bytes, *arguments: str, path: Path = library, command: Sequence[str] = (), stdout: int = -1
    ) -> subprocess.CompletedProcess[bytes]:
        file = tmp_path / "nvml.conf"
        file.write_bytes(control if isinstance(control, bytes) else control.encode())
        return subprocess.run(
            [*(command or collector.command()), *arguments],
            env=fake_nvml_environment(path, file),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=20,
            check=False,
        )

    return run


@pytest.fixture
def sample(run: Run) -> Sample:
    """The collector's answer, from a run that succeeded; silent on stderr unless `loud`."""

    def sample(control: str | bytes, *, loud: bool = False, **options: Any) -> dict[str, Any]:
        done = run(control, **options)
        assert done.returncode == 0
        assert bool(done.stderr) == loud, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return sample


# ---- the shape of the answer


def test_two_healthy_cards_are_reported_in_full(sample: Sample) -> None:
    assert sample("devices = 2\n1.utilization = 97 41\n1.power = 612300\n1.memory = 150754820096 4096 8192") == {
        "gpus": [
            {
                "index": 0,
                "uuid": "GPU-5f0c1e52-8a4d-4b7e-9c36-000000000000",
                "pci_bus_id": "00000000:01:00.0",
                "utilization_gpu": 40,
                "utilization_memory": 20,
                "memory_total_bytes": H200_MEMORY,
                "memory_used_bytes": 20 * 2**30,
                "memory_free_bytes": H200_MEMORY - 20 * 2**30 - 639 * 2**20,
                "temperature_c": 35,
                "power_usage_mw": 310000,
                "errors": [],
            },
            {
                "index": 1,
                "uuid": "GPU-5f0c1e52-8a4d-4b7e-9c36-000000000001",
                "pci_bus_id": "00000000:02:00.0",
                "utilization_gpu": 97,
                "utilization_memory": 41,
                "memory_total_bytes": H200_MEMORY,
                "memory_used_bytes": 4096,
                "memory_free_bytes": 8192,
                "temperature_c": 36,
                "power_usage_mw": 612300,
                "errors": [],
            },
        ],
        "error": "",
        "cc_ready": True,
        "cc_enabled": True,
        "sample_age_ms": None,
    }


def test_output_is_one_ascii_line_with_all_keys_in_the_order_of_the_contract(run: Run) -> None:
    out = run("devices = 2\n0.device = error 15").stdout
    assert out.isascii()
    assert out.endswith(b"}\n")
    assert out.count(b"\n") == 1
    answer = json.loads(out)
    assert list(answer) == RESPONSE_KEYS
    assert [list(gpu) for gpu in answer["gpus"]] == [DEVICE_KEYS, DEVICE_KEYS]


def test_the_plain_script_says_the_same(run: Run) -> None:
    script = [sys.executable, "-I", "-S", "-E", collector.__file__]
    ours, theirs = run("devices = 3"), run("devices = 3", command=script)
    assert (theirs.stdout, theirs.stderr, theirs.returncode) == (ours.stdout, ours.stderr, ours.returncode)


def test_as_a_module_of_the_package_it_says_the_same(run: Run) -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from guest_agent.collector import main; sys.exit(main([]))"
    root = Path(collector.__file__).parents[1]
    assert run("devices = 3", command=[sys.executable, "-c", code, str(root)]).stdout == run("devices = 3").stdout


def test_no_card_is_no_error(sample: Sample) -> None:
    answer = sample("devices = 0")
    assert answer == {"gpus": [], "error": "", "cc_ready": True, "cc_enabled": True, "sample_age_ms": None}


def test_zero_is_a_value_and_no_failure(sample: Sample) -> None:
    (gpu,) = sample("devices = 1\n0.utilization = 0 0\n0.memory = 9 0 9\n0.temperature = 0\n0.power = 0")["gpus"]
    assert [gpu[field] for field in collector.UPPER] == [0, 0, 9, 0, 9, 0, 0]
    assert gpu["errors"] == []


def test_each_numeric_field_has_exactly_one_reader_and_a_place_in_the_device() -> None:
    read = [field for _, fields, _ in collector.READERS for field in fields]
    assert ["index", *read, "errors"] == DEVICE_KEYS
    assert list(collector.UPPER) == [field for field in read if field not in ("uuid", "pci_bus_id")]


# ---- NVML unavailable


def assert_unavailable(answer: dict[str, Any], reason: str) -> None:
    assert answer == {"gpus": [], "error": reason, "cc_ready": None, "cc_enabled": None, "sample_age_ms": None}


def test_without_a_library_the_loader_s_reason_is_the_error(run: Run, tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        done = run("", path=tmp_path)
    else:
        pytest.skip("this machine has an NVIDIA driver")
    text = "failed to initialize NVML: libnvidia-ml.so.1: cannot open shared object file: No such file or directory"
    assert done.returncode == 0
    assert_unavailable(json.loads(done.stdout), text)
    assert done.stderr.decode() == f"warning: nvml unavailable: error={text}\n"


def test_a_library_that_is_none_is_the_error(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not an ELF file, and long enough to have had a header " * 9)
    answer = sample("", path=tmp_path, loud=True)
    assert answer["error"].startswith("failed to initialize NVML: ")
    assert answer["error"].endswith("libnvidia-ml.so.1: invalid ELF header")


@pytest.mark.parametrize(
    ("code", "reason"), [(9, "Driver Not Loaded"), (18, "Driver/library version mismatch"), (12345, "Unknown Error")]
)
def test_failed_init_is_the_error_in_nvml_s_words(sample: Sample, code: int, reason: str) -> None:
    answer = sample(f"devices = 2\ninit = error {code}", loud=True)
    assert_unavailable(answer, f"failed to initialize NVML: {reason}")


def test_failed_count_is_the_error(sample: Sample) -> None:
    answer = sample("devices = error 999", loud=True)
    assert_unavailable(answer, "failed to get NVML GPU count: Unknown Error")


def test_garbage_count_invents_no_devices(sample: Sample) -> None:
    answer = sample("devices = -1", loud=True)
    assert_unavailable(answer, "failed to get NVML GPU count: out of range (4294967295)")


def test_without_words_from_nvml_the_code_is_told(sample: Sample) -> None:
    answer = sample("init = error 18\nerror_string = error 1", loud=True)
    assert_unavailable(answer, "failed to initialize NVML: NVML error 18")


def test_a_reason_of_many_lines_is_one_in_the_error_and_on_stderr(run: Run) -> None:
    done = run(r"init = error 18" + "\n" + r"error_string = first\n\x1b[2J  second")
    assert json.loads(done.stdout)["error"] == "failed to initialize NVML: first \x1b[2J second"
    assert done.stderr == rb"warning: nvml unavailable: error=failed to initialize NVML: first \x1b[2J second" + b"\n"


# ---- cards and queries that fail


def test_a_lost_card_keeps_its_place_and_the_others_are_sampled(sample: Sample) -> None:
    gpus = sample("devices = 4\n1.device = error 15")["gpus"]
    assert [gpu["index"] for gpu in gpus] == [0, 1, 2, 3]
    assert [gpu["errors"] for gpu in gpus] == [[], ["device: GPU is lost"], [], []]
    unset = {"index": 1, "uuid": "", "pci_bus_id": "", "errors": ["device: GPU is lost"]}
    assert gpus[1] == {**unset, **dict.fromkeys(collector.UPPER)}
    assert all(None not in gpus[index].values() for index in (0, 2, 3))


@pytest.mark.parametrize(("query", "fields"), [(query, fields) for query, fields, _ in collector.READERS])
def test_a_failed_query_unsets_its_fields_only(sample: Sample, query: str, fields: tuple[str, ...]) -> None:
    (whole,) = sample("devices = 1")["gpus"]
    (gpu,) = sample(f"devices = 1\n0.{query} = error 3")["gpus"]
    unset = {field: None if field in collector.UPPER else "" for field in fields}
    assert gpu == {**whole, **unset, "errors": [f"{query}: Not Supported"]}


def test_entries_count_failures_whatever_the_reason_holds(sample: Sample) -> None:
    control = "devices = 1\nerror_string = a: b; c, d\n0.power = error 4\n0.temperature = error 4\n0.memory = error 4"
    (gpu,) = sample(control)["gpus"]
    assert gpu["errors"] == ["memory: a: b; c, d", "temperature: a: b; c, d", "power: a: b; c, d"]


@pytest.mark.parametrize("query", ["uuid", "pci_bus_id"])
def test_an_empty_identity_is_a_failed_query(sample: Sample, query: str) -> None:
    (gpu,) = sample(f"devices = 1\n0.{query} =")["gpus"]
    assert gpu[query] == ""
    assert gpu["errors"] == [f"{query}: empty answer"]


MISSING = {
    "nvmlInit_v2": "failed to initialize NVML: Function Not Found",
    "nvmlDeviceGetCount_v2": "failed to get NVML GPU count: Function Not Found",
    "nvmlDeviceGetHandleByIndex_v2": "device: Function Not Found",
    "nvmlDeviceGetUUID": "uuid: Function Not Found",
    "nvmlDeviceGetPciInfo_v3": "pci_bus_id: Function Not Found",
    "nvmlDeviceGetUtilizationRates": "utilization: Function Not Found",
    "nvmlDeviceGetMemoryInfo_v2": "memory: Function Not Found",
    "nvmlDeviceGetTemperature": "temperature: Function Not Found",
    "nvmlDeviceGetPowerUsage": "power: Function Not Found",
    "nvmlSystemGetConfComputeGpusReadyState": "warning: cc query failed: field=cc_ready reason=Function Not Found",
    "nvmlSystemGetConfComputeState": "warning: cc query failed: field=cc_enabled reason=Function Not Found",
    "nvmlShutdown": "warning: nvml shutdown failed: reason=Function Not Found",
    "nvmlErrorString": "",
}


@pytest.mark.parametrize(("symbol", "complaint"), MISSING.items())
def test_a_missing_symbol_costs_what_it_answers_and_nothing_else(run: Run, tmp_path: Path, symbol: str, complaint: str) -> None:
    done = run("devices = 1", path=build_fake_nvml(tmp_path, without=[symbol]))
    answer = json.loads(done.stdout)
    entries = [entry for gpu in answer["gpus"] for entry in gpu["errors"]]
    said = [answer["error"], *entries, *done.stderr.decode().splitlines()]
    assert [text for text in said if text and "nvml unavailable" not in text] == ([complaint] if complaint else [])
    assert done.returncode == 0
    assert len(answer["gpus"]) == (0 if answer["error"] else 1)
    assert (answer["cc_ready"] is None) == ("cc_ready" in complaint or bool(answer["error"]))
    assert (answer["cc_enabled"] is None) == ("cc_enabled" in complaint or bool(answer["error"]))


def test_every_symbol_that_is_called_was_tried_missing() -> None:
    called = re.findall(r'"(nvml\w+)"', Path(collector.__file__).read_text())
    assert sorted(called) == sorted(MISSING)


def test_without_any_error_words_codes_are_still_told(sample: Sample, tmp_path: Path) -> None:
    path = build_fake_nvml(tmp_path, without=["nvmlErrorString", "nvmlDeviceGetPowerUsage"])
    (gpu,) = sample("devices = 1\n0.uuid = error 15", path=path)["gpus"]
    assert gpu["errors"] == ["uuid: NVML error 15", "power: NVML error 13"]


# ---- values that cannot be true


@pytest.mark.parametrize(
    ("control", "unset", "error"),
    [
        ("utilization = 101 100", ["utilization_gpu"], "utilization: out of range (101)"),
        ("utilization = 100 101", ["utilization_memory"], "utilization: out of range (101)"),
        ("utilization = 4294967295 7", ["utilization_gpu"], "utilization: out of range (4294967295)"),
        ("utilization = -1 -1", ["utilization_gpu", "utilization_memory"], "utilization: out of range (4294967295)"),
        ("utilization = 101 200", ["utilization_gpu", "utilization_memory"], "utilization: out of range (101, 200)"),
        ("temperature = 201", ["temperature_c"], "temperature: out of range (201)"),
        ("temperature = -1", ["temperature_c"], "temperature: out of range (4294967295)"),
        ("power = 0x7ffffff0", ["power_usage_mw"], "power: out of range (2147483632)"),
        ("power = 10000001", ["power_usage_mw"], "power: out of range (10000001)"),
        (
            "memory = 9223372036854775794 5 4",
            ["memory_total_bytes"],
            "memory: out of range (9223372036854775794)",
        ),
        (
            "memory = 9223372036854775794 9223372036854775794 9223372036854775794",
            ["memory_total_bytes", "memory_used_bytes", "memory_free_bytes"],
            "memory: out of range (9223372036854775794)",
        ),
        ("memory = 9 10", ["memory_used_bytes", "memory_free_bytes"], f"memory: out of range (10, {ALL_ONES})"),
        ("memory = 9 10 3", ["memory_used_bytes", "memory_free_bytes"], "memory: out of range (10)"),
        ("memory = 9 5 -1", ["memory_free_bytes"], f"memory: out of range ({ALL_ONES})"),
        ("memory = 9 5 10", ["memory_free_bytes"], "memory: out of range (10)"),
        ("memory = 281474976710657 5 4", ["memory_total_bytes"], "memory: out of range (281474976710657)"),
    ],
)
def test_a_value_that_cannot_be_true_is_unset_with_one_entry(
    sample: Sample, control: str, unset: list[str], error: str
) -> None:
    (gpu,) = sample(f"devices = 1\n0.{control}")["gpus"]
    assert [field for field, value in gpu.items() if value is None] == unset
    assert gpu["errors"] == [error]


def test_the_largest_true_values_are_kept(sample: Sample) -> None:
    memory = f"0.memory = {2**48} {2**48} {2**48}"
    (gpu,) = sample(f"devices = 1\n0.utilization = 100 100\n{memory}\n0.temperature = 200\n0.power = 10000000")["gpus"]
    assert {field: gpu[field] for field in collector.UPPER} == collector.UPPER
    assert gpu["errors"] == []


def test_what_is_sound_beside_a_garbage_value_keeps_its_value(sample: Sample) -> None:
    (gpu,) = sample("devices = 1\n0.memory = 9 10\n0.utilization = 101 100")["gpus"]
    assert (gpu["memory_total_bytes"], gpu["utilization_memory"]) == (9, 100)


# ---- Confidential Computing


@pytest.mark.parametrize(("feature", "ready"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_cc_state_is_nvml_s(sample: Sample, feature: int, ready: int) -> None:
    answer = sample(f"devices = 1\ncc_feature = {feature}\ncc_ready = {ready}")
    assert answer["cc_enabled"] is bool(feature)
    assert answer["cc_ready"] is bool(ready)


@pytest.mark.parametrize(
    ("control", "reason"),
    [("error 3", "Not Supported"), ("2", "out of range (2)"), ("4294967295", "out of range (4294967295)")],
)
@pytest.mark.parametrize(("key", "field"), [("cc_ready", "cc_ready"), ("cc_feature", "cc_enabled")])
def test_a_failed_cc_query_unsets_its_field_and_is_logged_not_listed(
    run: Run, key: str, field: str, control: str, reason: str
) -> None:
    done = run(f"devices = 1\n{key} = {control}")
    answer = json.loads(done.stdout)
    states = {name: answer[name] for name in ("cc_ready", "cc_enabled")}
    assert states == {"cc_ready": True, "cc_enabled": True, field: None}
    assert answer["error"] == ""
    assert answer["gpus"][0]["errors"] == []
    assert done.stderr.decode() == f"warning: cc query failed: field={field} reason={reason}\n"


# ---- hostile text


def test_identities_are_passed_on_as_nvml_gave_them(sample: Sample) -> None:
    (gpu,) = sample("devices = 1\n0.uuid = gpu-ABC  def\n0.pci_bus_id = 00010000:AF:00.0")["gpus"]
    assert (gpu["uuid"], gpu["pci_bus_id"]) == ("gpu-ABC  def", "00010000:AF:00.0")


def test_hostile_uuid_bytes_cannot_break_the_line(run: Run) -> None:
    control = rb"devices = 1" + b"\n" + rb'0.uuid = "},\\\n\x01\x7f\x1b[2J' + b"\xff\xc3\xa9\xf0\x9f\x94\xa5\xed\xa0\x80"
    out = run(control).stdout
    assert out.isascii()
    assert out.count(b"\n") == 1
    (gpu,) = json.loads(out)["gpus"]
    assert gpu["uuid"] == '"},\\\n\x01\x7f\x1b[2J\ufffdé\U0001f525\ufffd\ufffd\ufffd'
    assert gpu["errors"] == []


def test_text_that_fills_its_buffer_is_whole(sample: Sample) -> None:
    (gpu,) = sample(f"devices = 1\n0.uuid = {'u' * 95}\n0.pci_bus_id = {'p' * 31}")["gpus"]
    assert (gpu["uuid"], gpu["pci_bus_id"]) == ("u" * 95, "p" * 31)


def test_json_of_every_character_reads_back() -> None:
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), *range(0x11000, 0x110000, 997), 0x10FFFF]))
    written = collector.to_json(every)
    assert written.isascii()
    assert written.isprintable()
    assert json.loads(written) == every


def test_json_of_half_a_surrogate_pair_is_the_replacement_character() -> None:
    assert json.loads(collector.to_json("a\ud800b\udfffc")) == "a\ufffdb\ufffdc"
    assert json.loads(collector.to_json("\ud83d\udd25")) == "\ufffd\ufffd"


def test_json_of_each_kind_of_value_reads_back() -> None:
    value = {"a": [None, True, False, 0, 1, 2**64 - 1, -1, "", "1"], "b\n": {}, "c": []}
    assert json.loads(collector.to_json(value)) == value
    assert collector.to_json(value).count("\n") == 0


# ---- the process


def imported(stderr: bytes) -> set[str]:
    return set(re.findall(r"^import time:.*\| +(\S+)$", stderr.decode(), re.MULTILINE)) - {"package"}


def test_nothing_is_imported_but_ctypes_and_what_it_needs(run: Run) -> None:
    python, *rest = collector.command()
    bare = run("", command=[python, "-X", "importtime", "-I", "-S", "-E", "-c", "import ctypes"])
    ours = run("devices = 2\n0.power = error 3\ncc_ready = error 3", command=[python, "-X", "importtime", *rest])
    assert "ctypes" in imported(ours.stderr)
    assert imported(ours.stderr) - imported(bare.stderr) == {"collector", "__future__"}


@pytest.mark.parametrize("arguments", [["--verbose"], ["--pretty", "--pretty"], ["x\ny"], [""], ["--help"]])
def test_an_unknown_argument_is_one_line_on_stderr_and_nothing_on_stdout(run: Run, arguments: list[str]) -> None:
    done = run("devices = 1", *arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: wrong arguments: ")
    assert done.stderr.endswith(b"\n")
    assert done.stderr.count(b"\n") == 1


def test_a_crash_in_the_driver_ends_the_process_by_its_signal(run: Run) -> None:
    done = run("devices = 1\n0.power = crash")
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == b""


def test_a_call_that_hangs_ends_by_sigterm_at_once(library: Path, tmp_path: Path) -> None:
    control = tmp_path / "nvml.conf"
    control.write_text("devices = 1\n0.power = hang")
    with subprocess.Popen(collector.command(), env=fake_nvml_environment(library, control), stdout=subprocess.PIPE) as process:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            start = time.monotonic()
            process.terminate()
            assert process.wait(5) == -signal.SIGTERM
            assert time.monotonic() - start < 1
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b""


def test_a_closed_stderr_costs_no_sample(run: Run) -> None:
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *collector.command()]
    done = run("init = error 18", command=closed)
    assert done.returncode == 0
    assert json.loads(done.stdout)["error"] == "failed to initialize NVML: Driver/library version mismatch"


def test_an_answer_that_cannot_be_written_is_a_failure(run: Run) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run("devices = 1", stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr == b"error: output failed: error=[Errno 28] No space left on device\n"


# ---- for people


def pretty(run: Run, control: str) -> str:
    done = run(control, "--pretty")
    assert done.returncode == 0
    assert done.stdout.isascii()
    return done.stdout.decode()


def test_pretty_is_a_table(run: Run) -> None:
    control = """
        devices = 3
        1.device = error 15
        2.utilization = 100 0
        2.power = 70123
        2.temperature = error 3
        2.memory = 9223372036854775794 1073741824 -1
        2.pci_bus_id = 00010000:AF:00.0
    """
    assert pretty(run, control) == (
        "Confidential Computing enabled: yes, GPUs ready: yes\n"
        "\n"
        "GPU  PCI address       GPU %  Memory %  Used GiB  Free GiB  Total GiB  Temp C  Power W\n"
        "  0  00000000:01:00.0     40        20      20.0     119.8      140.4      35    310.0\n"
        "  1  -                     -         -         -         -          -       -        -\n"
        "  2  00010000:AF:00.0    100         0       1.0         -          -       -     70.1\n"
        "\n"
        "GPU 0: GPU-5f0c1e52-8a4d-4b7e-9c36-000000000000\n"
        "GPU 1: no UUID\n"
        "GPU 1: device: GPU is lost\n"
        "GPU 2: GPU-5f0c1e52-8a4d-4b7e-9c36-000000000002\n"
        "GPU 2: memory: out of range (9223372036854775794, 18446744073709551615)\n"
        "GPU 2: temperature: Not Supported\n"
    )


def test_pretty_table_fits_100_columns_whatever_the_cards_say(run: Run) -> None:
    control = f"""
        devices = 64
        *.utilization = 100 100
        *.memory = {2**48} {2**48} {2**48}
        *.temperature = 200
        *.power = 10000000
        *.pci_bus_id = {chr(92)}x1b[2J{"p" * 26}
        *.uuid = {"u" * 60}
    """
    lines = pretty(run, control).splitlines()
    assert len(lines) == 3 + 64 + 1 + 64
    assert max(map(len, lines)) <= 100


def test_pretty_sends_no_control_sequence_to_the_terminal(run: Run) -> None:
    out = pretty(run, r"devices = 1" + "\n" + r"0.uuid = GPU\x1b[2J\n\xff")
    assert r"GPU 0: GPU\x1b[2J\n\ufffd" in out.splitlines()
    assert "\x1b" not in out


def test_pretty_says_what_is_not_known_and_that_there_is_no_card(run: Run) -> None:
    out = pretty(run, "devices = 0\ncc_ready = error 3\ncc_feature = 0")
    assert out == "Confidential Computing enabled: no, GPUs ready: unknown\n\nno NVIDIA GPUs\n"


def test_pretty_shows_the_error_in_place_of_the_table(run: Run) -> None:
    assert pretty(run, "init = error 9") == "error: failed to initialize NVML: Driver Not Loaded\n"


# ---- against nvidia-ml-py


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (collector.Utilization, pynvml.c_nvmlUtilization_t),
        (collector.Memory, pynvml.c_nvmlMemory_v2_t),
        (collector.PciInfo, pynvml.nvmlPciInfo_t),
        (collector.ConfComputeState, pynvml.c_nvmlConfComputeSystemState_t),
    ],
)
def test_structures_are_those_of_nvidia_ml_py(ours: type[ctypes.Structure], theirs: type[ctypes.Structure]) -> None:
    def layout(structure: type[ctypes.Structure]) -> list[tuple[str, Any, int]]:
        return [(name, kind, getattr(structure, name).offset) for name, kind, *_ in structure._fields_]

    assert layout(ours) == layout(theirs)
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)


def test_constants_are_those_of_nvidia_ml_py() -> None:
    assert pynvml.nvmlMemory_v2 == collector.NVML_MEMORY_V2
    names = [name for name in vars(collector) if name.startswith("NVML_") and name != "NVML_MEMORY_V2"]
    assert len(names) == 3
    assert {name: getattr(collector, name) for name in names} == {name: getattr(pynvml, name) for name in names}
    assert (pynvml.NVML_CC_SYSTEM_FEATURE_DISABLED, pynvml.NVML_CC_SYSTEM_FEATURE_ENABLED) == (0, 1)
    assert pynvml.NVML_CC_ACCEPTING_CLIENT_REQUESTS_FALSE == 0
    assert pynvml.NVML_CC_ACCEPTING_CLIENT_REQUESTS_TRUE == 1


def test_error_codes_of_these_tests_are_those_of_nvidia_ml_py() -> None:
    codes = {
        "INVALID_ARGUMENT": 2, "NOT_SUPPORTED": 3, "NO_PERMISSION": 4, "INSUFFICIENT_SIZE": 7, "DRIVER_NOT_LOADED": 9,
        "FUNCTION_NOT_FOUND": 13, "GPU_IS_LOST": 15, "LIB_RM_VERSION_MISMATCH": 18, "ARGUMENT_VERSION_MISMATCH": 25,
        "UNKNOWN": 999,
    }  # fmt: skip
    assert codes == {name: getattr(pynvml, f"NVML_ERROR_{name}") for name in codes}


def test_nvidia_ml_py_reads_the_same_from_the_same_library(run: Run) -> None:
    script = Path(__file__).parents[2] / "bench" / "collector_start_nvidia_ml_py.py"
    packages = str(Path(pynvml.__file__).parent)
    theirs = run("devices = 3", packages, command=[sys.executable, "-I", "-S", "-E", str(script)])
    assert json.loads(theirs.stdout) == json.loads(run("devices = 3").stdout)


# ---- the fake itself


@pytest.mark.parametrize(
    "line",
    ["device = 2", "0.powr = 5", "0.power = x", "0.power = 1 2", "0.power =", "0.utilization = 1", "nonsense",
     "64.power = 1", "x.power = 1", "init = 3", "0.device = 1", r"0.uuid = \q", "0.power = error", "delay_ms = soon",
     "0.uuid = " + 96 * "u"],
)  # fmt: skip
def test_the_fake_refuses_a_line_that_it_does_not_understand(run: Run, line: str) -> None:
    done = run(f"devices = 1\n{line}\n")
    assert json.loads(done.stdout)["error"] == "failed to initialize NVML: Unknown Error"
    assert b"fake nvml: line 2" in done.stderr


def test_the_fake_waits_as_told(run: Run) -> None:
    start = time.monotonic()
    assert json.loads(run("devices = 1\ninit = delay 400\n0.power = delay 300 5").stdout)["gpus"][0]["power_usage_mw"] == 5
    assert time.monotonic() - start > 0.7


def test_the_fake_is_not_built_without_a_function_that_it_never_had(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{SOURCE.name} has no function nvmlDeviceGetFanSpeed"):
        build_fake_nvml(tmp_path, without=["nvmlDeviceGetFanSpeed"])


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C compiler 'no-such-compiler'"):
        build_fake_nvml(tmp_path)
