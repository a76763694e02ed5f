//! What went wrong with a call of the Kubernetes API, in words that say what to do.

use std::{error::Error as StdError, fmt, time::Duration};

use super::node::ApiStatus;
use crate::subnet_manager::StoreError;

/// What kind of failure it was, as far as we act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// No answer, a broken one, or one that says that the server has trouble.
    Server,
    /// The server does not take our token (any more).
    Unauthorized,
    /// We may not do this.
    Forbidden,
    /// There is no such object.
    NotFound,
    /// The server no longer has the history, or the page, that we asked for.
    Gone,
}

/// A failed call: one line that names the server, the call, the cause and the way out.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Failure {
    pub cause: Cause,
    pub text: String,
    /// How long the server asks us to leave it in peace.
    pub retry_after: Option<Duration>,
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        Self::Unavailable(failure.text)
    }
}

/// A call in words: `get nodes/alder`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    /// The verb as RBAC names it.
    pub verb: &'static str,
    /// The resource as RBAC names it.
    pub resource: &'static str,
    /// The object, if it is about one.
    pub name: &'a str,
}

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, resource, name } = self;
        if name.is_empty() {
            write!(f, "{verb} {resource}")
        } else {
            write!(f, "{verb} {resource} {name}")
        }
    }
}

impl Failure {
    /// Nothing came back in time.
    pub(super) fn silent(server: &str, call: Call<'_>, waited: Duration) -> Self {
        Self::server(format!(
            "API server {server} does not answer `{call}` within {} s",
            waited.as_secs()
        ))
    }

    /// The connection failed or broke.
    pub(super) fn transport(server: &str, call: Call<'_>, error: &dyn StdError) -> Self {
        Self::server(format!("API server {server} cannot be asked to `{call}`: {}", chain(error)))
    }

    /// An answer that is not what the API promises.
    pub(super) fn nonsense(server: &str, call: Call<'_>, error: &dyn fmt::Display) -> Self {
        Self::server(format!(
            "API server {server} answers `{call}` with what cannot be read: {error}"
        ))
    }

    /// A failure with no other meaning than to try later.
    pub(super) fn server(text: String) -> Self {
        Self { cause: Cause::Server, text, retry_after: None }
    }

    /// The server refuses by a status.
    pub(super) fn status(
        server: &str,
        call: Call<'_>,
        code: u16,
        body: &[u8],
        retry_after: Option<Duration>,
    ) -> Self {
        let status: ApiStatus = serde_json::from_slice(body).unwrap_or_default();
        let said = |status: &ApiStatus| match status.message.as_str() {
            "" => String::new(),
            message => format!(" ({})", message.chars().take(300).collect::<String>()),
        };
        let (cause, text) = match code {
            401 => (
                Cause::Unauthorized,
                "401 Unauthorized: our token has expired or is not of this cluster; it is read \
                 again from its file at every try (service account token or kubeconfig)"
                    .to_owned(),
            ),
            403 => (Cause::Forbidden, format!("403 Forbidden{}: {}", said(&status), grant(call))),
            404 if call.resource == "nodes" || call.resource == "nodes/status" => (
                Cause::NotFound,
                "404 Not Found: there is no such node; is NODE_NAME the name that kubelet \
                 registers with?"
                    .to_owned(),
            ),
            404 => (Cause::NotFound, format!("404 Not Found{}", said(&status))),
            410 => (Cause::Gone, format!("410 Gone{}", said(&status))),
            // The server's data were restored from before what we saw.
            504 if status.message.contains("Too large resource version") => {
                (Cause::Gone, format!("504{}", said(&status)))
            }
            _ => (Cause::Server, format!("{code}{}", said(&status))),
        };
        let text = format!("API server {server} answers `{call}` with {text}");
        Self { cause, text, retry_after }
    }
}

/// The rule that would allow a call.
fn grant(call: Call<'_>) -> String {
    let Call { verb, resource, .. } = call;
    format!(
        "let the agent's service account {verb} {resource}: a ClusterRole bound to it needs the \
         rule {{apiGroups: [\"\"], resources: [\"{resource}\"], verbs: [\"{verb}\"]}}"
    )
}

/// An error and what caused it, each once.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATCH: Call<'_> = Call { verb: "patch", resource: "nodes/status", name: "alder" };

    #[test]
    fn a_denied_call_says_how_to_allow_it() {
        let body = br#"{"kind":"Status","message":"nodes \"alder\" is forbidden","code":403}"#;
        let failure = Failure::status("https://api:6443", PATCH, 403, body, None);
        assert_eq!(failure.cause, Cause::Forbidden);
        for part in
            ["https://api:6443", "patch nodes/status alder", "is forbidden", "verbs: [\"patch\"]"]
        {
            assert!(failure.text.contains(part), "{part}: {}", failure.text);
        }
    }

    #[test]
    fn an_answer_that_is_no_document_is_no_trouble() {
        let failure = Failure::status("x", PATCH, 502, b"<html>", None);
        assert_eq!(failure.cause, Cause::Server);
        assert_eq!(failure.text, "API server x answers `patch nodes/status alder` with 502");
    }
}
