"""Command-line tools on checkpoints; `cgrpo convert` has the same ones as subcommands."""
