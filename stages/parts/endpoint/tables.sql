-- The database of usage, in SQLite and PostgreSQL alike.
CREATE TABLE IF NOT EXISTS requests (
    id TEXT NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    client TEXT NOT NULL,
    model TEXT NOT NULL,
    release TEXT,
    server TEXT,
    path TEXT NOT NULL,
    status INTEGER NOT NULL,
    flags TEXT,
    prompt_tokens BIGINT,
    cached_tokens BIGINT,
    output_tokens BIGINT,
    ttft_ms DOUBLE PRECISION,
    duration_ms DOUBLE PRECISION NOT NULL,
    endpoint TEXT
);
CREATE INDEX IF NOT EXISTS requests_at ON requests (at);
CREATE INDEX IF NOT EXISTS requests_server ON requests (server);
CREATE TABLE IF NOT EXISTS counted (
    server TEXT NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    model TEXT NOT NULL,
    release TEXT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    endpoint TEXT,
    PRIMARY KEY (server, at)
);
CREATE TABLE IF NOT EXISTS taken (file TEXT PRIMARY KEY, bytes BIGINT NOT NULL)
