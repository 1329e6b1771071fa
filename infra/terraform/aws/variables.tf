variable "name" {
  description = "Begins the names of everything that is made."
  type        = string
  default     = "watchstep"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "Use 2 to 31 lower-case letters, digits and '-', beginning with a letter."
  }
}

variable "bucket" {
  description = "Name of the bucket that holds the runs; names are unique in all of AWS."
  type        = string
}

variable "prefix" {
  description = "Where in the bucket runs lie: WATCHSTEP_STORE is s3://BUCKET/PREFIX."
  type        = string
  default     = "runs"
}

variable "external_id" {
  description = "What the service shows when it takes the store's role; the same is registered with the store."
  type        = string
  sensitive   = true

  validation {
    condition     = length(var.external_id) >= 16
    error_message = "Use at least 16 characters that nobody guesses."
  }
}

variable "oidc_provider_arn" {
  description = "The OIDC provider of the EKS cluster that the service runs on; empty where it runs elsewhere."
  type        = string
  default     = ""
}

variable "service_account" {
  description = "NAMESPACE:NAME of the chart's service account on that cluster."
  type        = string
  default     = "watchstep:watchstep"
}

variable "trusted_principals" {
  description = "ARNs of roles that may become the service, where it does not run on EKS."
  type        = list(string)
  default     = []
}

variable "recorder_principals" {
  description = "ARNs of roles of training jobs that may record without credentials from the service; none by default."
  type        = list(string)
  default     = []
}

variable "direct_access" {
  description = "Whether the service reaches the bucket by its own role too, as its own store (WATCHSTEP_STORE) needs."
  type        = bool
  default     = true
}

variable "expire_days" {
  description = "After so many days objects are removed for good; 0: never. The service's own retention comes before."
  type        = number
  default     = 0
}

variable "kms_key_arn" {
  description = "Key that encrypts bucket and queue; S3's and SQS' own where it is empty."
  type        = string
  default     = ""
}

variable "tags" {
  description = "Of everything that is made."
  type        = map(string)
  default     = {}
}
