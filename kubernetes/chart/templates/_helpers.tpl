{{- define "peerlane.labels" -}}
app.kubernetes.io/name: peerlane
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "peerlane.image" -}}
{{ required "image.repository is required: the name under which your registry has the image of `make image`" .Values.image.repository }}:{{ required "image.tag is required" .Values.image.tag }}
{{- end }}
{{- define "peerlane.security" -}}
runAsUser: 0
runAsGroup: 0
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]{{ if . }}, add: [{{ . }}]{{ end }}}
seccompProfile: {type: RuntimeDefault}
{{- end }}
