#!/bin/sh
# Create the missing secrets of deploy/compose/compose.yaml, readable by their owner only.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
random() { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
if [ ! -e secrets/postgres.env ]; then
    password=$(random)
    printf 'POSTGRES_USER=coranto\nPOSTGRES_PASSWORD=%s\nPOSTGRES_DB=totals\n' "$password" > secrets/postgres.env
    printf 'TOTALS_STORE_URL=postgresql+psycopg://coranto:%s@postgres:5432/totals\n' "$password" > secrets/consumer.env
fi
if [ ! -e secrets/store.env ]; then
    key=$(random) secret=$(random)
    printf 'AWS_ACCESS_KEY_ID=%s\nAWS_SECRET_ACCESS_KEY=%s\n' "$key" "$secret" > secrets/store.env
    # MinIO's variables for the first user of the S3 server.
    printf 'MINIO_ROOT_USER=%s\nMINIO_ROOT_PASSWORD=%s\n' "$key" "$secret" > secrets/s3.env
fi
