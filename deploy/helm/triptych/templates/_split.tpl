{{/* Parts that gateways and engines share in a pod for each service. */}}

{{- define "triptych.sharedMounts" -}}
{{- if .Values.token.enabled }}
- {name: token, mountPath: /etc/triptych-token, readOnly: true}
{{- end }}
{{- if .Values.model.name }}
- {name: model, mountPath: /models/checkpoint, readOnly: true}
{{- end }}
{{- end }}

{{- define "triptych.sharedVolumes" -}}
{{- if .Values.token.enabled }}
- {name: token, secret: {secretName: {{ .Values.token.secret }}, optional: false}}
{{- end }}
{{- if .Values.model.name }}
- {name: model, persistentVolumeClaim: {claimName: {{ include "triptych.claim" . }}, readOnly: true}}
{{- end }}
{{- end }}

{{/* Pods wait for the mark of the job that downloads the model. */}}
{{- define "triptych.waitForModel" -}}
{{- if and .Values.model.name .Values.model.download }}
initContainers:
  - name: wait-for-model
    image: {{ include "triptych.image" (dict "root" . "name" "gateway") }}
    command: [sh, -ec, "until [ -f /models/checkpoint/.complete ]; do sleep 2; done"]
    resources:
      requests: {cpu: 10m, memory: 32Mi, ephemeral-storage: 64Mi}
      limits: {memory: 32Mi, ephemeral-storage: 256Mi}
    securityContext: {{ include "triptych.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /models/checkpoint, readOnly: true}
{{- end }}
{{- end }}
