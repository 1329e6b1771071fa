# The roles:
#   service   what the service's processes are. It takes the store's role, with the external id; on the bucket itself it has
#             rights only with direct_access, which the service's own store (WATCHSTEP_STORE) needs.
#   store     what is registered with a store. The service narrows each session of it down to one project and, for recorders
#             that ask it for credentials, to one attempt.
#   recorder  for training jobs that do not ask the service for credentials: they may record, in every project.

data "aws_iam_policy_document" "service_trust" {
  dynamic "statement" {
    for_each = var.oidc_provider_arn == "" ? [] : [var.oidc_provider_arn]

    content {
      sid     = "Cluster"
      actions = ["sts:AssumeRoleWithWebIdentity"]

      principals {
        type        = "Federated"
        identifiers = [statement.value]
      }

      condition {
        test     = "StringEquals"
        variable = "${local.oidc_issuer}:sub"
        values   = ["system:serviceaccount:${var.service_account}"]
      }

      condition {
        test     = "StringEquals"
        variable = "${local.oidc_issuer}:aud"
        values   = ["sts.amazonaws.com"]
      }
    }
  }

  dynamic "statement" {
    for_each = length(var.trusted_principals) == 0 ? [] : [var.trusted_principals]

    content {
      sid     = "Principals"
      actions = ["sts:AssumeRole"]

      principals {
        type        = "AWS"
        identifiers = statement.value
      }
    }
  }
}

data "aws_iam_policy_document" "store_trust" {
  statement {
    sid     = "ServiceWithExternalId"
    actions = ["sts:AssumeRole"]

    principals {
      type        = "AWS"
      identifiers = [aws_iam_role.service.arn]
    }

    condition {
      test     = "StringEquals"
      variable = "sts:ExternalId"
      values   = [var.external_id]
    }
  }
}

data "aws_iam_policy_document" "service" {
  statement {
    sid       = "TakeTheStoresRole"
    actions   = ["sts:AssumeRole"]
    resources = [aws_iam_role.store.arn]
  }

  statement {
    sid       = "Notify"
    actions   = ["sqs:SendMessage", "sqs:GetQueueUrl"]
    resources = [aws_sqs_queue.notifications.arn]
  }

  dynamic "statement" {
    for_each = var.kms_key_arn == "" ? [] : [var.kms_key_arn]

    content {
      sid       = "QueueKey"
      actions   = ["kms:GenerateDataKey", "kms:Decrypt"]
      resources = [statement.value]
    }
  }
}

data "aws_iam_policy_document" "store" {
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.runs.arn]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["${var.prefix}/*"]
    }
  }

  # Deleting is what retention does, and what takes the place of compacted segments.
  statement {
    sid       = "Objects"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = ["${aws_s3_bucket.runs.arn}/${var.prefix}/*"]
  }

  dynamic "statement" {
    for_each = var.kms_key_arn == "" ? [] : [var.kms_key_arn]

    content {
      sid       = "BucketKey"
      actions   = ["kms:GenerateDataKey", "kms:Decrypt"]
      resources = [statement.value]
    }
  }
}

data "aws_iam_policy_document" "recorder" {
  statement {
    sid       = "Record"
    actions   = ["s3:PutObject", "s3:GetObject", "s3:AbortMultipartUpload"]
    resources = ["${aws_s3_bucket.runs.arn}/${var.prefix}/*"]
  }

  # A ring of snapshots removes the oldest.
  statement {
    sid       = "Rotate"
    actions   = ["s3:DeleteObject"]
    resources = ["${aws_s3_bucket.runs.arn}/${var.prefix}/*/tensors/*"]
  }

  # A recorder that asks for a document that is not there yet would be refused without it, and not told so.
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.runs.arn]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["${var.prefix}/*"]
    }
  }

  dynamic "statement" {
    for_each = var.kms_key_arn == "" ? [] : [var.kms_key_arn]

    content {
      sid       = "BucketKey"
      actions   = ["kms:GenerateDataKey", "kms:Decrypt"]
      resources = [statement.value]
    }
  }
}

locals {
  oidc_issuer = replace(var.oidc_provider_arn, "/^.*oidc-provider\\//", "")
}

resource "aws_iam_role" "service" {
  name                 = "${var.name}-service"
  assume_role_policy   = data.aws_iam_policy_document.service_trust.json
  max_session_duration = 3600
  tags                 = var.tags

  lifecycle {
    precondition {
      condition     = var.oidc_provider_arn != "" || length(var.trusted_principals) > 0
      error_message = "Give oidc_provider_arn or trusted_principals: nobody could become the service."
    }
  }
}

resource "aws_iam_role" "store" {
  name                 = "${var.name}-store"
  assume_role_policy   = data.aws_iam_policy_document.store_trust.json
  max_session_duration = 3600
  tags                 = var.tags
}

data "aws_iam_policy_document" "recorder_trust" {
  statement {
    sid     = "TrainingJobsWithExternalId"
    actions = ["sts:AssumeRole"]

    principals {
      type        = "AWS"
      identifiers = var.recorder_principals
    }

    condition {
      test     = "StringEquals"
      variable = "sts:ExternalId"
      values   = [var.external_id]
    }
  }
}

resource "aws_iam_role" "recorder" {
  count = length(var.recorder_principals) > 0 ? 1 : 0

  name                 = "${var.name}-recorder"
  assume_role_policy   = data.aws_iam_policy_document.recorder_trust.json
  max_session_duration = 3600
  tags                 = var.tags
}

resource "aws_iam_role_policy" "service" {
  name   = "service"
  role   = aws_iam_role.service.id
  policy = data.aws_iam_policy_document.service.json
}

resource "aws_iam_role_policy" "store" {
  name   = "store"
  role   = aws_iam_role.store.id
  policy = data.aws_iam_policy_document.store.json
}

resource "aws_iam_role_policy" "service_store" {
  count = var.direct_access ? 1 : 0

  name   = "store"
  role   = aws_iam_role.service.id
  policy = data.aws_iam_policy_document.store.json
}

resource "aws_iam_role_policy" "recorder" {
  count = length(var.recorder_principals) > 0 ? 1 : 0

  name   = "recorder"
  role   = aws_iam_role.recorder[0].id
  policy = data.aws_iam_policy_document.recorder.json
}
