{{/* The pod of a worker. (dict "root" $ "worker" w "rank" "" | "leader" | "follower"); a rank only with more machines. */}}
{{- define "pdgate.workerPod" -}}
{{- $w := .worker -}}
{{- $root := .root -}}
{{- $grace := add $w.drainSeconds 15 -}}
metadata:
  labels:
    {{- include "pdgate.labels" (dict "root" $root "component" (eq .rank "follower" | ternary "worker-follower" "worker")) | nindent 4 }}
    {{- include "pdgate.workerLabels" $w | nindent 4 }}
  annotations: {{- include "pdgate.catalogDigest" $root | nindent 4 }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext: {{- include "pdgate.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- $where := deepCopy $w.nodeSelector }}
  {{- if $w.zone }}{{ $_ := set $where "topology.kubernetes.io/zone" $w.zone }}{{ end }}
  {{- with $where }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with $w.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  # On SIGTERM the worker takes nothing new and what runs ends within the drain; what does not is continued elsewhere.
  terminationGracePeriodSeconds: {{ $grace }}
  containers:
    - name: worker
      image: {{ include "pdgate.image" (dict "root" $root "image" $w.image) }}
      imagePullPolicy: {{ $w.image.pullPolicy }}
      {{- if .rank }}
      {{- $options := merge (dict "nnodes" (int $w.nodes) "node_rank" "RANK" "dist_init_addr" "$(LWS_LEADER_ADDRESS):20000") $w.engineOptions }}
      # Kubernetes puts in what the LeaderWorkerSet controller tells each pod.
      command:
        - env
        - {{ printf "WORKER_ENGINE_OPTIONS=%s" (toJson $options | replace "\"RANK\"" "$(LWS_WORKER_INDEX)") | quote }}
        {{- range $w.command }}
        - {{ . | quote }}
        {{- end }}
      {{- else }}
      command: {{ toJson $w.command }}
      {{- end }}
      securityContext: # the engine compiles kernels into its home, so its files are not read-only
        allowPrivilegeEscalation: false
        capabilities: {{ toJson (dict "drop" (list "ALL") "add" $w.capabilities) }}
      ports: [{name: grpc, containerPort: 9001}, {name: bootstrap, containerPort: 8998}, {name: bootstrap-2, containerPort: 8999}, {name: metrics, containerPort: 9100}]
      env:
        {{- include "pdgate.secretEnv" (list $root "WORKER_REDIS_URL" "redis-url") | nindent 8 }}
        {{- include "pdgate.secretEnv" (list $root "WORKER_PEER_TOKEN" "peer-token") | nindent 8 }}
        - {name: WORKER_OPEN_HEALTH, value: "true"} # the kubelet cannot show a token; health tells no more than its probes
        {{- include "pdgate.fieldEnv" (list "WORKER_ID" "metadata.name") | nindent 8 }}
        {{- include "pdgate.fieldEnv" (list "WORKER_NODE" "spec.nodeName") | nindent 8 }}
        {{- include "pdgate.fieldEnv" (list "WORKER_ADVERTISE" "status.podIP") | nindent 8 }}
        {{- include "pdgate.fieldEnv" (list "WORKER_BOOTSTRAP_HOST" "status.podIP") | nindent 8 }}
        {{- include "pdgate.fieldEnv" (list "SGLANG_HOST_IP" "status.podIP") | nindent 8 }}
        - {name: HOME, value: /tmp}
        - {name: WORKER_POOL, value: {{ $w.pool | quote }}}
        - {name: WORKER_ROLE, value: {{ $w.role | quote }}}
        - {name: WORKER_ENGINE, value: {{ $w.engine | quote }}}
        - {name: WORKER_LISTEN, value: "0.0.0.0:9001"}
        - {name: WORKER_BOOTSTRAP_PORT, value: "8998"}
        - {name: WORKER_METRICS_LISTEN, value: "0.0.0.0:9100"}
        - {name: WORKER_CATALOG, value: /etc/pdgate/models.toml}
        - {name: WORKER_MODEL_PATH, value: {{ printf "/models/%s" $w.modelPath | quote }}}
        - {name: WORKER_JOURNAL_DIR, value: /var/lib/pdgate/journal}
        - {name: WORKER_DRAIN_S, value: {{ $w.drainSeconds | quote }}}
        {{- with $w.zone }}
        - {name: WORKER_ZONE, value: {{ . | quote }}}
        {{- end }}
        {{- with $w.profile }}
        - {name: WORKER_PROFILE, value: {{ . | quote }}}
        {{- end }}
        {{- if and $w.engineOptions (not .rank) }}
        - {name: WORKER_ENGINE_OPTIONS, value: {{ toJson $w.engineOptions | quote }}}
        {{- end }}
        {{- with $root.Values.otlpEndpoint }}
        - {name: WORKER_OTLP_ENDPOINT, value: {{ . | quote }}}
        {{- end }}
        {{- range $key, $value := $w.env }}
        - {name: {{ $key }}, value: {{ $value | quote }}}
        {{- end }}
      resources: {{ toJson $w.resources }}
      {{- if ne .rank "follower" }}
      # The port opens when the weights are loaded.
      startupProbe:
        grpc: {port: 9001, service: pdgate.v1.Worker}
        periodSeconds: 10
        failureThreshold: {{ div (add $w.startupSeconds 9) 10 }}
      # Alive is whose work moves: a hung engine whose port still answers is not.
      livenessProbe:
        grpc: {port: 9001, service: pdgate.v1.Worker}
        periodSeconds: 10
        timeoutSeconds: 3
        failureThreshold: 6
      # In whatever role it has: roles change in place.
      readinessProbe:
        grpc: {port: 9001, service: pdgate.ready}
        periodSeconds: 5
        timeoutSeconds: 3
      {{- end }}
      volumeMounts:
        - {name: catalog, mountPath: /etc/pdgate, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models, readOnly: true}
        - {name: state, mountPath: /var/lib/pdgate}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    {{- include "pdgate.catalogVolume" $root | nindent 4 }}
    - name: models
      {{- toYaml $root.Values.models.volume | nindent 6 }}
    - name: state
      emptyDir: {sizeLimit: 1Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $w.sharedMemory }}}
{{- end }}
