"""Files in the forms of other gateways, with the keys that public files of these forms have, and their import."""

from __future__ import annotations

from typing import Any

import yaml

from gateway.cli.importing.imported_config import ImportedConfig
from gateway.cli.importing.litellm_import import import_litellm
from gateway.cli.importing.stack_import import import_stack
from gateway.config.loading import validated
from gateway.config.models import Config
from gateway.config.yaml_source import parse

CANARY = "sk-canary-0123456789abcdef"  # a literal key, which must be in no output


class FilledEnvironment(dict[str, str]):
    """Has every variable, with a value that suits its name."""

    def get(self, name: str, default: Any = None) -> Any:
        if name.endswith("_SHA256"):
            return "0" * 64
        if "BASE" in name or "URL" in name:
            return "redis://10.1.2.3" if "REDIS" in name else "http://10.1.2.3:8000/v1"
        return "6379" if name.endswith("_PORT") else f"v-{name.lower()}"


def loaded(found: ImportedConfig) -> Config:
    """The written YAML, read and checked by the gateway's own loader."""
    return validated(parse(found.text(), "imported.yaml", FilledEnvironment()))


def litellm(text: str) -> ImportedConfig:
    return import_litellm(yaml.safe_load(text))


def stack(text: str, release: str = "vllm") -> ImportedConfig:
    return import_stack(yaml.safe_load(text), release)


def deployment(params: str, name: str = "chat", more: str = "") -> str:
    """A file with one deployment."""
    return f"model_list:\n- {{model_name: {name}, litellm_params: {{{params}}}{more}}}\n"


TEAM = f"""
model_list:
  - model_name: chat
    litellm_params: {{model: openai/gpt-4.1-mini, api_key: os.environ/OPENAI_API_KEY, rpm: 60, tpm: 100000, order: 2}}
    model_info: {{mode: chat, base_model: gpt-4.1-mini, max_input_tokens: 1000000, supports_vision: true, id: a1}}
  - model_name: chat
    litellm_params:
      model: hosted_vllm/qwen3-8b
      api_base: http://gpu1:8000/v1
      order: 1
      stream_timeout: 30
      max_parallel_requests: 40
      additional_drop_params: [logit_bias]
  - model_name: chat
    litellm_params:
      model: hosted_vllm/qwen3-8b
      api_base: http://gpu2:8000/v1
      order: 1
      stream_timeout: 30
      max_parallel_requests: 40
      additional_drop_params: [logit_bias]
  - model_name: azure chat
    litellm_params:
      model: azure/gpt-4o
      api_base: https://team.openai.azure.com/
      api_key: {CANARY}
      api_version: 2024-10-21
      input_cost_per_token: 0.0000025
      output_cost_per_token: 0.00001
      extra_headers: {{x-team: search, authorization: {CANARY}}}
      timeout: 60
      temperature: 0.2
      drop_params: true
  - model_name: claude
    litellm_params: {{model: claude-sonnet-4-5, max_tokens: 8000}}
  - model_name: claude
    litellm_params: {{model: bedrock/anthropic.claude-sonnet-4-5-v1:0, aws_region_name: eu-west-1}}
  - model_name: embed
    litellm_params: {{model: ollama/nomic-embed-text, api_base: http://ollama:11434}}
    model_info: {{mode: embedding}}
  - model_name: picture
    litellm_params: {{model: openai/dall-e-3}}
    model_info: {{mode: image_generation}}
  - model_name: "*"
    litellm_params: {{model: "openrouter/*", api_key: os.environ/OPENROUTER_API_KEY}}
  - model_name: "groq/*"
    litellm_params: {{model: "groq/*"}}
litellm_settings:
  num_retries: 3
  request_timeout: 120
  drop_params: true
  set_verbose: false
  json_logs: true
  cache: true
  cache_params: {{type: redis, host: os.environ/REDIS_HOST, password: {CANARY}}}
  success_callback: [langfuse, prometheus]
  context_window_fallbacks: [{{chat: [claude]}}]
  content_policy_fallbacks: [{{claude: [azure chat]}}]
router_settings:
  routing_strategy: latency-based-routing
  num_retries: 1
  allowed_fails: 3
  cooldown_time: 60
  retry_policy: {{TimeoutErrorRetries: 1}}
  fallbacks: [{{azure chat: [chat]}}, {{gone: [chat]}}]
  model_group_alias: {{gpt-4: chat, hidden-one: {{model: claude, hidden: true}}, nowhere: gone}}
  redis_host: os.environ/REDIS_HOST
  redis_port: 6380
  redis_password: {CANARY}
general_settings:
  master_key: {CANARY}
  database_url: postgresql://user:{CANARY}@db/litellm
  store_model_in_db: true
  alerting: [slack]
environment_variables: {{OPENAI_API_KEY: {CANARY}}}
mcp_servers: {{mail: {{url: http://mail, auth_value: {CANARY}}}}}
"""

HELM = f"""
servingEngineSpec:
  runtimeClassName: ""
  vllmApiKey: {CANARY}
  strategy: {{type: Recreate}}
  modelSpec:
    - name: llama
      repository: vllm/vllm-openai
      tag: latest
      modelURL: meta-llama/Llama-3.1-8B-Instruct
      replicaCount: 2
      requestCPU: 6
      requestGPU: 1
      pvcStorage: 50Gi
      hf_token: {CANARY}
      enableLoRA: true
      vllmConfig: {{maxModelLen: 4096, dtype: bfloat16, maxLoras: 4, extraArgs: ["--disable-log-requests"]}}
      lmcacheConfig: {{enabled: true, cpuOffloadingBufferSize: "20"}}
      env: [{{name: HF_HOME, value: /data}}]
    - name: qwen
      modelURL: /models/qwen3
      replicaCount: 1
      vllmConfig: {{extraArgs: ["--served-model-name", qwen3-8b]}}
    - {{name: off, modelURL: m, enabled: false}}
routerSpec:
  enableRouter: true
  replicaCount: 2
  routingLogic: session
  sessionKey: x-user-id
  engineScrapeInterval: 15
  requestStatsWindow: 60
  resources: {{requests: {{cpu: "1"}}}}
  otel: {{endpoint: "otel:4317"}}
  staticBackends: "http://10.0.0.1:8000,http://10.0.0.2:8000"
  staticModels: "m,m"
cacheserverSpec: {{replicaCount: 1, image: {{repository: r}}}}
loraAdapters:
  - {{name: a, baseModel: llama, adapterSource: {{type: huggingface, adapterName: sql, repository: r}}}}
"""
