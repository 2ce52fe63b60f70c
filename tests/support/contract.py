"""The configuration of the contract with users: every section, every form."""

from __future__ import annotations

CONTRACT = """
server: {listen: 127.0.0.1:8080, admin: 127.0.0.1:9090, workers: 1}
pools:
  small:
    backend: vllm
    model: qwen3-8b
    endpoints:
      - http://10.0.0.11:8000
      - {url: http://10.0.0.12:8000, region: eu-west, kv_events: tcp://10.0.0.12:5557}
    tokenizer: o200k_base
    context_window: 32768
    capabilities: [tools, json_schema]
    price: {input: 0.05, output: 0.20}
    block_size: 16
    keep_warm: {idle: 60s}
  large:  {backend: vllm, model: qwen3-72b, endpoints: [http://10.0.1.11:8000]}
  openai: {backend: openai, model: gpt-4.1-mini, api_key: "${OPENAI_API_KEY}"}
routes:
  chat:
    workload: chat
    ttft:  {budget: 800ms, target: 0.95}
    tpot:  {budget: 50ms}
    total: {budget: 30s}
    tiers:
      - large
      - {pool: small, when: {prompt_tokens: "<= 8000", tools: false, header.x-team: web}}
      - openai
    hedge: {max_extra: 3%%}
    on_miss: best_effort
    rescue: off
    prefer: quality
    limits: {output_tokens: 1024}
defaults: {connect: 2s, stream_idle: 30s, max_attempts: 3, max_body: 32MB}
state: {redis: redis://127.0.0.1:6379/0}
keys:
  - {name: web-app, sha256: "%s", routes: [chat], requests_per_minute: 600, tokens_per_minute: 2000000,
     cache_group: web}
telemetry: {otlp: http://127.0.0.1:4318, access_log: stdout, prompts: never}
""" % ("0" * 64)
