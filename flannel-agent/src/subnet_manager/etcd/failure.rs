//! What went wrong with an etcd call, in words that say what to do.

use std::error::Error as StdError;

use etcd_client::Error;
use tonic::{Code, Status};

use super::endpoint::{Endpoint, root_cause};
use crate::subnet_manager::StoreError;

/// What kind of failure it was, as far as we act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// This endpoint is of no use now; another one may be.
    Endpoint,
    /// The token we sent is not (or no longer) good; a new one may be.
    Token,
    /// The cluster does not use authentication.
    AuthDisabled,
    /// The revision asked for is no longer there.
    Compacted,
    /// The etcd lease named does not exist.
    LeaseGone,
    /// etcd understood and refused. Every member would.
    Refused,
}

/// A failed call: one line that names the endpoint, the cause and the way out.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Failure {
    pub cause: Cause,
    pub text: String,
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        Self::Unavailable(failure.text)
    }
}

impl Failure {
    pub(super) fn new(cause: Cause, text: impl Into<String>) -> Self {
        Self { cause, text: text.into() }
    }

    /// Nothing came back in time.
    pub(super) fn silent(endpoint: &Endpoint, seconds: u64) -> Self {
        Self::new(
            Cause::Endpoint,
            format!(
                "etcd endpoint {endpoint} does not answer within {seconds} s: is it overloaded, or \
                 does a firewall drop the packets?"
            ),
        )
    }

    /// Puts an error of the client library into words.
    pub(super) fn explain(endpoint: &Endpoint, has_user: bool, error: &Error) -> Self {
        let (cause, what) = match error {
            Error::GRpcStatus(status) => explain_status(endpoint, has_user, status),
            Error::TransportError(error) => explain_transport(endpoint, error),
            other => (Cause::Endpoint, format!("fails: {other}")),
        };
        Self::new(cause, format!("etcd endpoint {endpoint} {what}"))
    }

    /// Puts the reason for which etcd cancelled a watch into words.
    pub(super) fn watch_cancelled(endpoint: &Endpoint, has_user: bool, reason: &str) -> Self {
        let code = if reason.contains("permission denied") {
            Code::PermissionDenied
        } else {
            Code::Unavailable
        };
        let (cause, what) = explain_status(endpoint, has_user, &Status::new(code, reason));
        Self::new(cause, format!("etcd endpoint {endpoint} {what}"))
    }
}

fn explain_status(endpoint: &Endpoint, has_user: bool, status: &Status) -> (Cause, String) {
    let message = status.message();
    let says = |text: &str| message.contains(text);
    if says("has been compacted") {
        (Cause::Compacted, "no longer has the revision we asked for".to_owned())
    } else if says("requested lease not found") {
        (Cause::LeaseGone, "does not know the etcd lease any more".to_owned())
    } else if says("no leader") {
        (
            Cause::Endpoint,
            "has no leader: the cluster has lost its quorum, or this member is cut off".to_owned(),
        )
    } else if says("authentication is not enabled") {
        (Cause::AuthDisabled, "does not use authentication".to_owned())
    } else if says("authentication failed") {
        (
            Cause::Refused,
            "refuses user name or password: check -etcd-username and -etcd-password".to_owned(),
        )
    } else if says("user name is empty") && !has_user {
        (Cause::Refused, "wants a user: set -etcd-username and -etcd-password".to_owned())
    } else if says("invalid auth token")
        || says("auth store is old")
        || says("user name is empty")
        || status.code() == Code::Unauthenticated
    {
        (Cause::Token, format!("refuses our authentication token: {message}"))
    } else if status.code() == Code::PermissionDenied {
        let who = if has_user { "the user of -etcd-username" } else { "an anonymous client" };
        (
            Cause::Refused,
            format!(
                "denies permission to {who}: its role needs readwrite on the whole -etcd-prefix"
            ),
        )
    } else if says("database space exceeded") {
        (
            Cause::Refused,
            "is out of space: compact and defragment it, then disarm its alarm".to_owned(),
        )
    } else if let Some(source) = status.source() {
        explain_transport(endpoint, source)
    } else {
        let cause = match status.code() {
            Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::NotFound => Cause::Refused,
            _ => Cause::Endpoint,
        };
        (cause, format!("answers with an error: {message}"))
    }
}

fn explain_transport(endpoint: &Endpoint, error: &(dyn StdError + 'static)) -> (Cause, String) {
    let mut chain = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        chain.push_str(": ");
        chain.push_str(&source.to_string());
        next = source.source();
    }
    let says = |texts: &[&str]| texts.iter().any(|text| chain.contains(text));
    let what = if says(&["UnknownIssuer", "BadSignature"]) {
        "shows a certificate that our CA has not signed: check -etcd-cafile (without it the \
         system's CAs count)"
            .to_owned()
    } else if says(&["NotValidForName", "not valid for name"]) {
        "shows a certificate that is not made out to this name or address: use the one in it as \
         endpoint, or add this one to it"
            .to_owned()
    } else if says(&["certificate: Expired", "certificate expired", "NotValidYet", "not valid yet"])
    {
        "shows a certificate that is not valid today: renew it, or check this host's clock"
            .to_owned()
    } else if says(&["CertificateRequired", "BadCertificate", "UnknownCA", "CertificateUnknown"]) {
        "does not accept our client certificate (or wants one): check -etcd-certfile and -etcd-keyfile"
            .to_owned()
    } else if says(&["invalid peer certificate"]) {
        format!("shows an unusable certificate: {}", root_cause(error))
    } else if says(&["InvalidContentType", "handshake eof", "corrupt message", "InvalidMessage"]) {
        "does not speak TLS: use http:// in -etcd-endpoints".to_owned()
    } else if says(&["received fatal alert", "HandshakeFailure", "PeerIncompatible"]) {
        format!("does not agree on TLS with us: {}", root_cause(error))
    } else if says(&["onnection refused"]) {
        "refuses the connection: is etcd running and listening there?".to_owned()
    } else if says(&["timed out", "imeout expired", "deadline has elapsed"]) {
        "does not answer: is it up, and does a firewall drop the packets?".to_owned()
    } else if says(&["failed to lookup", "dns error"]) {
        format!("has a name that cannot be resolved: {}", root_cause(error))
    } else if says(&["unreachable", "No route to host"]) {
        format!("cannot be reached from here: {}", root_cause(error))
    } else if endpoint.tls {
        // Some servers close the connection instead of naming what they miss.
        format!(
            "dropped the connection ({}): if it wants a client certificate, check -etcd-certfile \
             and -etcd-keyfile; if it does not speak TLS, use http:// in -etcd-endpoints",
            root_cause(error)
        )
    } else {
        format!(
            "dropped the connection ({}): if it wants TLS, use https:// in -etcd-endpoints",
            root_cause(error)
        )
    };
    (Cause::Endpoint, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Endpoint {
        Endpoint { url: "http://192.0.2.21:2379".into(), tls: false }
    }

    fn explained(code: Code, message: &str, has_user: bool) -> Failure {
        Failure::explain(&plain(), has_user, &Error::GRpcStatus(Status::new(code, message)))
    }

    #[test]
    fn every_cause_has_its_own_words_and_names_the_endpoint() {
        let texts: Vec<String> = [
            explained(Code::Unavailable, "etcdserver: no leader", false),
            explained(
                Code::InvalidArgument,
                "etcdserver: authentication failed, invalid user ID or password",
                true,
            ),
            explained(Code::InvalidArgument, "etcdserver: user name is empty", false),
            explained(Code::PermissionDenied, "etcdserver: permission denied", true),
            explained(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded", false),
            Failure::silent(&plain(), 3),
        ]
        .into_iter()
        .map(|failure| failure.text)
        .collect();
        for (i, text) in texts.iter().enumerate() {
            assert!(text.contains("http://192.0.2.21:2379") && !text.contains('\n'), "{text}");
            assert!(!texts[..i].contains(text), "{text}");
        }
        assert!(texts[1].contains("-etcd-password"));
        assert!(texts[2].contains("-etcd-username"));
        assert!(texts[3].contains("-etcd-prefix"));
    }

    #[test]
    fn causes_that_are_acted_on() {
        for (code, message, cause) in [
            (
                Code::OutOfRange,
                "etcdserver: mvcc: required revision has been compacted",
                Cause::Compacted,
            ),
            (Code::NotFound, "etcdserver: requested lease not found", Cause::LeaseGone),
            (Code::Unauthenticated, "etcdserver: invalid auth token", Cause::Token),
            (Code::InvalidArgument, "etcdserver: revision of auth store is old", Cause::Token),
            (
                Code::FailedPrecondition,
                "etcdserver: authentication is not enabled",
                Cause::AuthDisabled,
            ),
            (
                Code::InvalidArgument,
                "etcdserver: duplicate key given in txn request",
                Cause::Refused,
            ),
            (Code::Unavailable, "etcdserver: request timed out", Cause::Endpoint),
        ] {
            assert_eq!(explained(code, message, true).cause, cause, "{message}");
        }
        // With a user configured an empty name means that we sent no token yet.
        assert_eq!(
            explained(Code::InvalidArgument, "etcdserver: user name is empty", true).cause,
            Cause::Token
        );
    }

    #[test]
    fn the_innermost_transport_error_decides() {
        for (kind, text, word) in [
            (std::io::ErrorKind::ConnectionRefused, "Connection refused (os error 111)", "refuses"),
            (
                std::io::ErrorKind::InvalidData,
                "invalid peer certificate: UnknownIssuer",
                "-etcd-cafile",
            ),
            (
                std::io::ErrorKind::InvalidData,
                "invalid peer certificate: certificate not valid for name \"x\": NotValidForName",
                "name or address",
            ),
            (
                std::io::ErrorKind::InvalidData,
                "received fatal alert: CertificateRequired",
                "-etcd-certfile",
            ),
            (
                std::io::ErrorKind::InvalidData,
                "received corrupt message of type InvalidContentType",
                "http://",
            ),
            (std::io::ErrorKind::TimedOut, "connection timed out", "firewall"),
        ] {
            let status = Status::from_error(Box::new(std::io::Error::new(kind, text)));
            let failure = Failure::explain(&plain(), false, &Error::GRpcStatus(status));
            assert_eq!(failure.cause, Cause::Endpoint);
            assert!(failure.text.contains(word), "{text}: {}", failure.text);
        }
    }
}
