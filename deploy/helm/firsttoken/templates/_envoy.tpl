{{/* As deploy/envoy/envoy.yaml, with the pickers' health, a port for probes and metrics, and names of
services in its own namespace. */}}
{{- define "firsttoken.envoyConfig" -}}
{{- $name := include "firsttoken.name" . -}}
{{- $engines := .Values.envoy.engines -}}
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}
static_resources:
  listeners:
    - name: callers
      address: {socket_address: {address: 0.0.0.0, port_value: 8080}}
      per_connection_buffer_limit_bytes: {{ int64 .Values.envoy.maxBodyBytes }} # the longest body
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: callers
                generate_request_id: true
                access_log: # tells the picker the end of an answer, of which it reads the first token alone
                  - name: envoy.access_loggers.http_grpc
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig
                      common_config:
                        log_name: answers
                        transport_api_version: V3
                        grpc_service: {envoy_grpc: {cluster_name: picker}} # the same as that of ext_proc
                        buffer_flush_interval: 0.1s
                        buffer_size_bytes: 1
                route_config:
                  virtual_hosts:
                    - name: engines
                      domains: ["*"]
                      routes:
                        - match: {prefix: /}
                          route:
                            cluster: engines
                            timeout: 0s
                            idle_timeout: 0s
                            retry_policy:
                              retry_on: connect-failure,refused-stream,reset-before-request
                              num_retries: 3
                http_filters:
                  - name: envoy.filters.http.ext_proc
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
                      grpc_service: {envoy_grpc: {cluster_name: picker}}
                      failure_mode_allow: true
                      message_timeout: 0.25s # above the 0.2 s within which the picker answers
                      max_message_timeout: 60s # above `pick.hold`, for which a picker may ask
                      processing_mode:
                        request_header_mode: SEND
                        request_body_mode: BUFFERED
                        response_header_mode: SEND
                        response_body_mode: STREAMED
                        request_trailer_mode: SKIP
                        response_trailer_mode: SKIP
                      response_attributes: [upstream.address]
                      metadata_options:
                        forwarding_namespaces: {untyped: [envoy.lb, envoy.lb.subset_hint]}
                        receiving_namespaces: {untyped: [envoy.lb]}
                  - name: envoy.filters.http.router
                    typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
    - name: probes # readiness and metrics alone, of an admin port that is else private
      address: {socket_address: {address: 0.0.0.0, port_value: 9902}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: probes
                route_config:
                  virtual_hosts:
                    - name: admin
                      domains: ["*"]
                      routes:
                        - match: {path: /ready, headers: [{name: ":method", string_match: {exact: GET}}]}
                          route: {cluster: admin}
                        - match: {path: /stats/prometheus, headers: [{name: ":method", string_match: {exact: GET}}]}
                          route: {cluster: admin}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
    - name: picker
      cluster_type: # each address of the name is a host
        name: envoy.clusters.dns
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster
          dns_refresh_rate: 1s
      connect_timeout: 0.25s
      # Of several pickers, one that is gone is asked no more after its first failure, and one that hangs after 1.5 s.
      outlier_detection:
        consecutive_5xx: 1
        consecutive_gateway_failure: 1
        enforcing_consecutive_gateway_failure: 100
        interval: 0.2s
        base_ejection_time: 2s
        max_ejection_percent: 100
      health_checks:
        - {timeout: 1s, interval: 0.5s, no_traffic_interval: 0.5s, unhealthy_threshold: 1, healthy_threshold: 1, grpc_health_check: {}}
      common_lb_config: {healthy_panic_threshold: {value: 0}} # no picker is better than one that drains or hangs
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: {http2_protocol_options: {}}
      load_assignment:
        cluster_name: picker
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: {{ $name }}-pickers, port_value: 9002}}}
    - name: engines
      cluster_type: # a headless service; addresses that the picker names must be among its own
        name: envoy.clusters.dns
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster
          dns_refresh_rate: 1s
      connect_timeout: 1s
      load_balancing_policy:
        policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.override_host
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
                override_host_sources:
                  - metadata:
                      key: envoy.lb
                      path: [{key: x-gateway-destination-endpoint}]
                fallback_policy:
                  policies:
                    - typed_extension_config:
                        name: envoy.load_balancing_policies.round_robin
                        typed_config:
                          "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin
      load_assignment:
        cluster_name: engines
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: {{ $engines.host | default (printf "%s-engines" $name) }}, port_value: {{ int $engines.port }}}}}
    - name: admin
      type: STATIC
      load_assignment:
        cluster_name: admin
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}
{{- end -}}
