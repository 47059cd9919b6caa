{{/* Name of an object. A release that is not called triptych adds its name, so that several fit a
     namespace. Arguments: root, name. */}}
{{- define "triptych.name" -}}
{{ .name }}{{ if ne .root.Release.Name "triptych" }}-{{ .root.Release.Name }}{{ end }}
{{- end }}

{{/* Metadata of an object. Arguments: root, name. */}}
{{- define "triptych.metadata" -}}
name: {{ include "triptych.name" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  app.kubernetes.io/part-of: triptych
  app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{/* Labels that select the pods of a service. Arguments: root, name. */}}
{{- define "triptych.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{/* Image of a service. Arguments: root, name, gpus (null: an image without engines). */}}
{{- define "triptych.image" -}}
{{- $image := index .root.Values.images .name }}
{{- $kind := "" }}
{{- if hasKey . "gpus" }}{{ $kind = ternary "-gpu" "-cpu" (gt (int .gpus) 0) }}{{ end }}
{{- $tag := default (print .root.Chart.AppVersion $kind) $image.tag }}
{{- with .root.Values.images.registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}

{{/* Beginning of a pod's spec. Arguments: root, name, fsGroup (optional). */}}
{{- define "triptych.pod" -}}
serviceAccountName: {{ include "triptych.name" . }}
automountServiceAccountToken: false
# A Service named gateway would add GATEWAY_PORT=tcp://… to the environment.
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  {{- if .fsGroup }}
  fsGroup: 10001
  {{- end }}
  {{- if eq (.fsGroup | default "") "volume" }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "triptych.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Nodes of a pod. Arguments: root, values (the section of the pod). */}}
{{- define "triptych.nodes" -}}
{{- $gpu := .root.Values.gpu }}
{{- $selector := .values.nodeSelector }}
{{- if gt (int (.values.gpus | default 0)) 0 }}
{{- $selector = merge (dict) $selector $gpu.nodeSelector }}
{{- with $gpu.computeMajor }}
{{- $majors := list }}
{{- range . }}{{ $majors = append $majors (toString .) }}{{ end }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - {key: nvidia.com/gpu.compute.major, operator: In, values: {{ toJson $majors }}}
{{- end }}
{{- with $gpu.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $selector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Resources of a pod's container with its GPUs. Arguments: root, values (the section). */}}
{{- define "triptych.resources" -}}
{{- $found := deepCopy .values.resources }}
{{- if gt (int .values.gpus) 0 }}
{{- range $kind := list "requests" "limits" }}
{{- $_ := set (index $found $kind) $.root.Values.gpu.resource (toString (int $.values.gpus)) }}
{{- end }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{/* Each roll-out's pods are spread by themselves. Arguments: root, name. */}}
{{- define "triptych.spread" -}}
topologySpreadConstraints:
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "triptych.selector" $ | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end }}

{{/* Settings of a service as a ConfigMap's data. Arguments: settings (the chart's own), values. */}}
{{- define "triptych.settings" -}}
{{- range $name, $value := merge (dict) .values.settings .settings }}
{{ $name }}: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/* Torch takes as many threads as the container requests CPUs. Argument: the container's name. */}}
{{- define "triptych.threads" -}}
# A container without a CPU limit sees all CPUs of its node.
- name: OMP_NUM_THREADS
  valueFrom:
    resourceFieldRef: {containerName: {{ . }}, resource: requests.cpu, divisor: "0"}
{{- end }}

{{/* Volume with the key file. */}}
{{- define "triptych.keysVolume" -}}
# Without the secret the pod does not start; a changed one is read within a minute or two.
- name: keys
  secret:
    secretName: {{ .Values.keys.secret }}
    optional: false
    items: [{key: keys.json, path: keys.json}]
{{- end }}

{{/* Variable with keys, which may be absent. */}}
{{- define "triptych.keysVariable" -}}
- name: GATEWAY_API_KEYS
  valueFrom: {secretKeyRef: {name: {{ .Values.keys.secret }}, key: api-keys, optional: true}}
{{- end }}

{{- define "triptych.hubToken" -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.model.hubSecret.name }}, key: {{ .Values.model.hubSecret.key }}, optional: true}
{{- end }}

{{/* The adapters as a setting of encoders and decoders: sql=/adapters/sql,gui=/adapters/gui */}}
{{- define "triptych.adapters" -}}
{{- $found := list }}
{{- range $name, $place := .Values.adapters.served }}
{{- if and (eq $.Values.form "split") (not (hasPrefix "/" $place)) }}
{{- fail (printf "adapters.served.%s: %s is no absolute directory; only one pod (form: single) takes adapters from the hub" $name $place) }}
{{- end }}
{{- $found = append $found (printf "%s=%s" $name $place) }}
{{- end }}
{{- join "," $found }}
{{- end }}

{{- define "triptych.adaptersMount" -}}
{{- if .Values.adapters.existingClaim }}
- {name: adapters, mountPath: /adapters, readOnly: true}
{{- end }}
{{- end }}

{{- define "triptych.adaptersVolume" -}}
{{- with .Values.adapters.existingClaim }}
- {name: adapters, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- end }}

{{- define "triptych.claim" -}}
{{ default (include "triptych.name" (dict "root" . "name" "model")) .Values.storage.existingClaim }}
{{- end }}

{{/* Egress to the cluster's names. */}}
{{- define "triptych.names" -}}
- to:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}
      podSelector: {matchExpressions: [{key: k8s-app, operator: In, values: [kube-dns]}]}
    # NodeLocal DNSCache, where nodes have it
    - ipBlock: {cidr: 169.254.20.10/32}
  ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end }}

{{/* Egress to the public internet, without private and other special ranges (of IPv6 also those
     that carry IPv4 addresses). Argument: list of ports. */}}
{{- define "triptych.internet" -}}
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except:
          - 0.0.0.0/8
          - 10.0.0.0/8
          - 100.64.0.0/10
          - 127.0.0.0/8
          - 168.63.129.16/32
          - 169.254.0.0/16
          - 172.16.0.0/12
          - 192.168.0.0/16
          - 198.18.0.0/15
          - 224.0.0.0/3
    - ipBlock:
        cidr: ::/0
        except:
          - ::/96
          - 64:ff9b::/96
          - 64:ff9b:1::/48
          - 100::/64
          - 2001::/23
          - 2001:db8::/32
          - 2002::/16
          - fc00::/7
          - fe80::/10
          - fec0::/10
          - ff00::/8
  ports:
  {{- range . }}
    - {port: {{ . }}, protocol: TCP}
  {{- end }}
{{- end }}

{{/* Peer of a network policy. Arguments: root, name. */}}
{{- define "triptych.peer" -}}
- podSelector:
    matchLabels: {{ include "triptych.selector" . | nindent 6 }}
{{- end }}

{{/* Ingress from Prometheus. Argument: port. */}}
{{- define "triptych.scrape" -}}
- from:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}
  ports: [{port: {{ . }}, protocol: TCP}]
{{- end }}

{{/* Names of the services of this form. */}}
{{- define "triptych.services" -}}
{{- if eq .Values.form "single" }}triptych
{{- else if .Values.model.images }}gateway encoder decoder
{{- else }}gateway decoder
{{- end }}
{{- end }}

{{/* An object of files/, with the namespace and the release in its queries. Arguments: root, file. */}}
{{- define "triptych.file" -}}
{{- .root.Files.Get (print "files/" .file)
  | replace `namespace="triptych"` (printf "namespace=%q" .root.Release.Namespace)
  | replace `installation="triptych"` (printf "installation=%q" .root.Release.Name) }}
{{- end }}

{{- define "triptych.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata: {{ include "triptych.metadata" . | nindent 2 }}
automountServiceAccountToken: false
{{- end }}
