output "store" {
  description = "WATCHSTEP_STORE, and the url of the registered store."
  value       = "s3://${aws_s3_bucket.runs.bucket}/${var.prefix}"
}

output "service_role_arn" {
  description = "The chart's serviceAccount.annotations: eks.amazonaws.com/role-arn."
  value       = aws_iam_role.service.arn
}

output "store_role_arn" {
  description = "The role of the registered store."
  value       = aws_iam_role.store.arn
}

output "recorder_role_arn" {
  description = "The role of training jobs that do not ask the service for credentials; empty without recorder_principals."
  value       = try(aws_iam_role.recorder[0].arn, "")
}

output "queue_url" {
  description = "Of the receiver of kind sqs."
  value       = aws_sqs_queue.notifications.url
}
