import sys

from megatron_cgrpo.cli import main

sys.exit(main())
