#!/bin/sh
# Tonight's file through the fleet, for cron or any other scheduler:
#
#   15 1 * * *  TOKENMILL_DATABASE_URL=postgresql+psycopg://user@db/tokenmill /srv/app/examples/nightly.sh /data
#
# FOLDER/prompts.jsonl becomes FOLDER/answers-2026-11-29.jsonl, with failures in answers-2026-11-29.errors.jsonl.
# The exit status is bulk run's: 0 all answered, 1 some lines failed, 2 a bad input file, 3 something is down.
set -eu
folder=${1:?usage: nightly.sh FOLDER}
day=$(date +%F)

exec tokenmill bulk run "$folder/prompts.jsonl" -o "$folder/answers-$day.jsonl" \
  --name "nightly $day" --max-tokens 256 2>>"$folder/nightly.log"
