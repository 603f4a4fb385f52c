"""The command `pdgate`. Each group of commands has a file of its own; this one puts them together."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from contracts.catalog import CatalogError
from pdgate.backup import backup, restore
from pdgate.bench.command import bench
from pdgate.children import end_with_caller
from pdgate.commands import Commands
from pdgate.connection import data_folder
from pdgate.correct_usage import correct_usage
from pdgate.credit_commands import budgets_app, credits_app
from pdgate.dead_letter_commands import dead_letters
from pdgate.demo import demo
from pdgate.doctor import doctor
from pdgate.engine import ensure_engine
from pdgate.init import init
from pdgate.invite_commands import invite
from pdgate.invoice_commands import invoices_app
from pdgate.key_commands import keys
from pdgate.layout import catalog_file, layout_of
from pdgate.libibverbs import ensure_libibverbs
from pdgate.model_commands import add_model, remove_model
from pdgate.models import ensure_model
from pdgate.name_commands import list_names, put_name, remove_name
from pdgate.plan.command import plan
from pdgate.preflight import CannotStart
from pdgate.price_commands import prices
from pdgate.reconcile import reconcile
from pdgate.replay import replay
from pdgate.restore_usage import restore_usage
from pdgate.roster import EngineKind, Options
from pdgate.screen import Screen
from pdgate.second_factor_commands import second_factor_off
from pdgate.serving_commands import models
from pdgate.sharing_commands import sharing
from pdgate.simulate import simulate
from pdgate.stack import EXIT_CANNOT_START, run_stack
from pdgate.tenant_commands import orgs, suspend_model
from pdgate.top import top
from pdgate.usage import usage_app
from pdgate.why import why
from pdgate.worker_commands import workers

app = typer.Typer(
    help="Serverless gateway for LLM inference with prefill/decode disaggregation and phase-split billing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
engine = typer.Typer(help="The real engine's environment (SGLang, torch; about 3 GB).", no_args_is_help=True)
models.command("add")(add_model)
models.command("remove")(remove_model)
models.command("pause")(suspend_model)
models.command("names")(list_names)
models.command("alias")(put_name)
models.command("unalias")(remove_name)
app.add_typer(models, name="models")
orgs.add_typer(sharing, name="share-group")
orgs.command("invite")(invite)
orgs.command("second-factor-off")(second_factor_off)
app.add_typer(orgs, name="orgs")
app.add_typer(keys, name="keys")
app.add_typer(prices, name="prices")
app.add_typer(credits_app, name="credits")
app.add_typer(budgets_app, name="budgets")
app.add_typer(invoices_app, name="invoices")
usage_app.command("restore")(restore_usage)
usage_app.command("correct")(correct_usage)
usage_app.add_typer(dead_letters, name="dead-letters")
app.add_typer(usage_app, name="usage")
app.add_typer(engine, name="engine")
app.add_typer(workers, name="workers")
app.add_typer(bench, name="bench")
app.command("init")(init)
app.command("doctor")(doctor)
app.command("demo")(demo)
app.command("backup")(backup)
app.command("restore")(restore)
app.command("simulate")(simulate)
app.command("replay")(replay)
app.command("plan")(plan)
app.command("reconcile")(reconcile)
app.command("top")(top)
app.command("why")(why)

Data = Annotated[Path | None, typer.Option("--data", help="Folder for data, logs and keys.  [default: .pdgate]")]


@app.command()
def up(
    engine: Annotated[EngineKind, typer.Option(help="sglang is real; timed simulates.")] = EngineKind.SGLANG,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers per model pool.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers per model pool.")] = 1,
    unified: Annotated[int, typer.Option(min=0, help="Workers that do both.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway.")] = 8080,
    data: Data = None,
    demo: Annotated[bool, typer.Option(help="Make a demo key, and on new data play a week of demo traffic.")] = True,
    demo_week: Annotated[bool, typer.Option(help="Without it, a demo key and no week of traffic.")] = True,
    with_caller: Annotated[
        bool, typer.Option("--with-caller", help="Stop when the process that started this one ends.")
    ] = False,
) -> None:
    """Run the whole stack on this machine, in the foreground."""
    if with_caller:
        end_with_caller()
    options = Options(
        engine=engine,
        prefill=prefill,
        decode=decode,
        unified=unified,
        host=host,
        port=port,
        demo=demo,
        demo_week=demo and demo_week,
    )
    raise typer.Exit(run_stack(options, layout_of(data or data_folder()), catalog_file()))


@engine.command("install")
def install_engine() -> None:
    """Build the environment and prepare the models, whichever are missing."""
    layout = layout_of(data_folder())
    screen = Screen()
    commands = Commands(screen.progress)

    async def run() -> None:
        await ensure_libibverbs(layout.libraries, commands)
        await ensure_engine(layout.engine, commands)
        for name in ("smollm2", "tiny"):
            await ensure_model(name, layout.models, layout.engine, commands)

    try:
        asyncio.run(run())
    finally:
        screen.clear()
    screen.say(f"The engine is in {layout.engine}, the models are in {layout.models}.")


def main() -> None:
    """Run the command line; an expected fault is one line and exit code 2."""
    try:
        app()
    except (CannotStart, CatalogError) as error:
        fault = str(error)
    except (RedisError, SQLAlchemyError, OSError) as error:
        fault = f"the stack does not answer ({error}): is `pdgate up` running?"
    else:
        return
    print(f"pdgate: {fault}", file=sys.stderr)
    sys.exit(EXIT_CANNOT_START)


if __name__ == "__main__":
    main()
