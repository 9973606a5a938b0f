-- For each start of a server: what it counted between two readings, less the requests that ended between them.
WITH counts AS (
    SELECT server, model, release, max(endpoint) AS endpoint, max(at) AS until,
        COALESCE(max(CASE WHEN at <= since THEN at END), 0) AS began,
        max(prompt_tokens) - COALESCE(max(CASE WHEN at <= since THEN prompt_tokens END), 0) AS prompt,
        max(output_tokens) - COALESCE(max(CASE WHEN at <= since THEN output_tokens END), 0) AS output
    FROM counted CROSS JOIN (SELECT CAST(? AS DOUBLE PRECISION) AS since) AS period
    GROUP BY server, model, release HAVING max(at) > max(since)
)
SELECT counts.endpoint, counts.model, counts.release, counts.prompt - COALESCE(sum(requests.prompt_tokens), 0),
    counts.output - COALESCE(sum(requests.output_tokens), 0)
FROM counts LEFT JOIN requests ON requests.server = counts.server
    AND requests.at + requests.duration_ms / 1000 > counts.began
    AND requests.at + requests.duration_ms / 1000 <= counts.until
GROUP BY counts.server, counts.endpoint, counts.model, counts.release, counts.prompt, counts.output
