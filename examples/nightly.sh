#!/bin/sh
# Tonight's file through the fleet, for cron or any other scheduler:
#
#   PATH=/srv/app/venv/bin:/usr/bin:/bin
#   TOKENMILL_BROKER_URL=redis://queue:6379/0
#   TOKENMILL_DATABASE_URL=postgresql+psycopg://user@db/tokenmill
#   15 1 * * *  /srv/app/examples/nightly.sh /data
#
# Cron knows nothing of a virtual environment, nor of your shell's settings: the crontab has to name both.
#
# FOLDER/prompts.jsonl becomes FOLDER/answers-2026-11-29.jsonl, with failures in answers-2026-11-29.errors.jsonl.
# The exit status is bulk run's: 0 all answered, 1 some lines failed, 2 a bad input file, 3 something is down.
set -eu
folder=${1:?usage: nightly.sh FOLDER}
day=$(date +%F)

if ! command -v tokenmill >/dev/null; then
  echo "nightly.sh: no tokenmill on PATH ($PATH). Put its folder first: PATH=/srv/app/venv/bin:\$PATH" >&2
  exit 127
fi

exec tokenmill bulk run "$folder/prompts.jsonl" -o "$folder/answers-$day.jsonl" \
  --name "nightly $day" --max-tokens 256 2>>"$folder/nightly.log"
