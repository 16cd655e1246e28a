"""The command ``gradlineage``: reads the command line, runs one of `commands` and turns what went wrong into words and an exit status.

Saved files are read without importing torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from gradlineage.commands import add_commands
from gradlineage.errors import LineageError, TraceError
from gradlineage.terminal import UserError, complain, report

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own) and give its exit status.

    0 done, 1 the model failed or what was asked about does not hold, 2 the command could not be understood.
    """
    failed = 1
    try:
        parser = argparse.ArgumentParser("gradlineage", description="What feeds each layer of a PyTorch model.", allow_abbrev=False)
        add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
        options = parser.parse_args(argv)
        failed = 2 if options.command == "diff" else 1  # there 1 says that they differ
        status: int = options.run(options)
        return status
    except SystemExit as stop:  # argparse has said it all
        return stop.code if isinstance(stop.code, int) else 2
    except UserError as failure:
        report(failure)
        return failed
    except TraceError as error:
        return complain(error, failed)
    except LineageError as error:
        return complain(error, 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough; nothing may be left for the flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
