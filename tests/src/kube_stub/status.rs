//! The error documents of the API.

use serde_json::{Value, json};

/// An error: HTTP status and document.
#[derive(Debug)]
pub(super) struct Refusal {
    pub code: u16,
    pub document: String,
}

impl Refusal {
    /// An error about nothing in particular.
    pub fn new(code: u16, reason: &str, message: &str) -> Self {
        Self { code, document: document(code, reason, message, &Value::Null) }
    }

    /// The request makes no sense.
    pub fn bad_request(message: &str) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// There is no such object.
    pub fn not_found(kind: &str, name: &str) -> Self {
        let message = format!("{kind} \"{name}\" not found");
        let details = json!({"name": name, "kind": kind});
        Self { code: 404, document: document(404, "NotFound", &message, &details) }
    }

    /// RBAC says no.
    pub fn forbidden(user: &str, verb: &str, resource: &str, name: &str, scope: &str) -> Self {
        let kind = resource.split('/').next().unwrap_or_default();
        let object = if name.is_empty() { kind.to_owned() } else { format!("{kind} \"{name}\"") };
        let message = format!(
            "{object} is forbidden: User \"{user}\" cannot {verb} resource \"{resource}\" in API \
             group \"\" {scope}"
        );
        let mut details = json!({"kind": kind});
        if !name.is_empty() {
            details["name"] = json!(name);
        }
        Self { code: 403, document: document(403, "Forbidden", &message, &details) }
    }
}

fn document(code: u16, reason: &str, message: &str, details: &Value) -> String {
    let mut status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    });
    if !details.is_null() {
        status["details"] = details.clone();
    }
    status.to_string()
}
