{{- define "watchstep.labels" -}}
app.kubernetes.io/name: watchstep
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "watchstep.selector" -}}
app.kubernetes.io/name: watchstep
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "watchstep.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "watchstep.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default .Release.Name }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- /* What every pod of the service has, whatever it runs. */ -}}
{{- define "watchstep.pod" -}}
serviceAccountName: {{ include "watchstep.serviceAccount" . }}
automountServiceAccountToken: {{ .Values.serviceAccount.token }}
# Kubernetes would otherwise set variables like WATCHSTEP_PORT to addresses of the release's services.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: { medium: Memory, sizeLimit: 256Mi }
  - name: work
    emptyDir: { medium: Memory, sizeLimit: 64Mi }
{{- if .Values.rules }}
  - name: rules
    configMap:
      name: {{ .Release.Name }}-rules
{{- end }}
{{- end -}}

{{- define "watchstep.container" -}}
image: {{ include "watchstep.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
workingDir: /run/watchstep
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - { name: tmp, mountPath: /tmp }
  - { name: work, mountPath: /run/watchstep }
{{- if .Values.rules }}
  - { name: rules, mountPath: /etc/watchstep, readOnly: true }
{{- end }}
env:
  - name: WATCHSTEP_STORE
    value: {{ required "store: where runs lie, s3://bucket/prefix" .Values.store | quote }}
  - name: WATCHSTEP_PUBLIC_URL
    value: {{ required "publicUrl: where people reach the API" .Values.publicUrl | quote }}
  - name: WATCHSTEP_DATABASE_URL
    valueFrom:
      secretKeyRef:
        name: {{ required "database.secret: the secret that holds the database's URL" .Values.database.secret }}
        key: {{ .Values.database.key }}
  - name: WATCHSTEP_BROKER_URL
    valueFrom:
      secretKeyRef:
        name: {{ required "broker.secret: the secret that holds the Redis' URL" .Values.broker.secret }}
        key: {{ .Values.broker.key }}
  - name: WATCHSTEP_LOG
    value: {{ .Values.log }}
  - name: WATCHSTEP_METRICS_HOST
    value: "0.0.0.0"
  - name: WATCHSTEP_METRICS_PORT
    value: {{ .Values.metrics.port | quote }}
  - name: WATCHSTEP_DRAIN_SECONDS
    value: {{ .Values.api.drainSeconds | quote }}
  - name: WATCHSTEP_MIGRATE
    value: {{ ternary "never" "at_start" .Values.migrations.job }}
{{- if .Values.rules }}
  - name: WATCHSTEP_RULES_FILE
    value: /etc/watchstep/rules.yaml
{{- end }}
{{- range $name, $value := .Values.settings }}
  - name: {{ $name }}
    value: {{ $value | quote }}
{{- end }}
{{- range .Values.secretSettings }}
  - name: {{ .name }}
    valueFrom:
      secretKeyRef: { name: {{ .secret }}, key: {{ .key }} }
{{- end }}
{{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
