#!/usr/bin/env bash
# Backups of MLflow's two databases in $SKYTRAIN_MLFLOW_BACKUPS (s3://BUCKET/PREFIX). The artifacts are in the bucket anyway.
#
#     backup.sh now | daily | list | restore [STAMP]
#
# Stop the server before `restore`; it takes the newest complete backup, or the named one. PGHOST, PGUSER and PGPASSWORD
# name the database, AWS_* the bucket.
set -euo pipefail

databases="mlflow accounts"
aws_s3() { aws ${AWS_ENDPOINT_URL:+--endpoint-url "$AWS_ENDPOINT_URL"} s3 "$@" --only-show-errors; }

now() {
    local stamp database
    stamp=$(date -u +%Y-%m-%dT%H%M%SZ)
    for database in $databases; do
        pg_dump --format=custom "$database" | aws_s3 cp - "$SKYTRAIN_MLFLOW_BACKUPS/$stamp/$database.dump"
    done
    # Written last: a backup without it is incomplete.
    echo "$databases" | aws_s3 cp - "$SKYTRAIN_MLFLOW_BACKUPS/$stamp/complete"
    echo "backup: $stamp"
}

list() {  # the stamps of all complete backups, the oldest first
    local bucket=${SKYTRAIN_MLFLOW_BACKUPS#s3://}
    aws ${AWS_ENDPOINT_URL:+--endpoint-url "$AWS_ENDPOINT_URL"} s3api list-objects-v2 --bucket "${bucket%%/*}" \
        --prefix "${bucket#*/}/" --query 'Contents[].[Key]' --output text | sed -n 's|.*/\([^/]*\)/complete$|\1|p' | sort
}

restore() {
    local stamp=${1:-} database
    [ -n "$stamp" ] || stamp=$(list | tail -n 1)
    [ -n "$stamp" ] || { echo "backup: no complete backup in $SKYTRAIN_MLFLOW_BACKUPS" >&2; exit 2; }
    list | grep -qxF -- "$stamp" || { echo "backup: no complete backup $stamp; see backup.sh list" >&2; exit 2; }
    for database in $databases; do
        # One transaction: a backup that cannot be read leaves the database as it was.
        aws_s3 cp "$SKYTRAIN_MLFLOW_BACKUPS/$stamp/$database.dump" - |
            pg_restore --clean --if-exists --no-owner --single-transaction --exit-on-error --dbname "$database"
    done
    echo "restored: $stamp"
}

case ${1:-} in
now | list) "$1" ;;
restore) restore "${2:-}" ;;
# A process of its own: `now ||` would go on after an error, and write `complete`.
daily) while true; do bash "$0" now || echo "backup: failed; the next one is tomorrow" >&2; sleep 86400 & wait $!; done ;;
*) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
