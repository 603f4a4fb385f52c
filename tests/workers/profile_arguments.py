"""Builds SGLang's own arguments from every profile and role; run by the engine's Python, prints JSON.

`resolve_once` and `check_server_args` are what SGLang itself runs before it starts anything. The device is named,
so no accelerator is needed; what only one can show (kernels, memory, networks) is not tried.
"""

import json
import os
import sys
from pathlib import Path

from contracts.lifecycle import Role
from workers.engines.sglang_options import SglangOptions, arguments, switchable
from workers.profile import profile_names, read_profile


def main(model: str) -> None:
    from sglang.srt.server_args import ServerArgs

    def resolved(chosen: dict) -> ServerArgs:
        server_args = ServerArgs(**chosen, device="cuda")
        server_args.resolve_once()
        server_args.check_server_args()
        return server_args

    results = []
    for name in profile_names():
        profile = read_profile(name)
        for role in profile.roles:
            further = dict(profile.arguments(role))
            further.pop("disaggregation_ib_device", None)  # looked up among this machine's devices
            if further.get("speculative_draft_model_path"):
                further["speculative_draft_model_path"] = model
            options = SglangOptions(
                role=role,
                model_path=model,
                bootstrap_host="127.0.0.1",
                bootstrap_port=8998,
                peer_timeout_s=60,
                further=further,
            )
            chosen = arguments(options, accelerator=True, bootstrap_port=8998)
            result = {"profile": name, "role": role, "error": "", "switchable": False, "refused_switch": ""}
            try:
                server_args = resolved(chosen)
                result["ignored"] = sorted(key for key in further if not hasattr(server_args, key))
            except Exception as error:  # noqa: BLE001 - whatever SGLang raises is the result
                result["error"] = f"{type(error).__name__}: {error}"
            if role is not Role.UNIFIED:
                result["switchable"] = switchable(further)
                try:
                    resolved({**chosen, "enable_pd_role_switch": True})
                except Exception as error:  # noqa: BLE001 - whatever SGLang raises is the result
                    result["refused_switch"] = str(error)
            results.append(result)
    sys.stdout.write("\n" + json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))
