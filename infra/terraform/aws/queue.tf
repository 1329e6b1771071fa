# A queue that the service may send notifications to: the receiver of kind sqs. What nobody takes away goes to a second
# queue after five tries, and is kept there for two weeks.

resource "aws_sqs_queue" "dead" {
  name                      = "${var.name}-notifications-dead"
  message_retention_seconds = 1209600
  sqs_managed_sse_enabled   = var.kms_key_arn == "" ? true : null
  kms_master_key_id         = var.kms_key_arn == "" ? null : var.kms_key_arn
  tags                      = var.tags
}

resource "aws_sqs_queue" "notifications" {
  name                       = "${var.name}-notifications"
  visibility_timeout_seconds = 60
  message_retention_seconds  = 345600
  sqs_managed_sse_enabled    = var.kms_key_arn == "" ? true : null
  kms_master_key_id          = var.kms_key_arn == "" ? null : var.kms_key_arn
  tags                       = var.tags

  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead.arn
    maxReceiveCount     = 5
  })
}

resource "aws_sqs_queue_redrive_allow_policy" "dead" {
  queue_url = aws_sqs_queue.dead.id

  redrive_allow_policy = jsonencode({
    redrivePermission = "byQueue"
    sourceQueueArns   = [aws_sqs_queue.notifications.arn]
  })
}
