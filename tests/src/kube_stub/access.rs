//! Who asks, and what they may do: authentication by token or client certificate, and the
//! `ClusterRole` that flannel's manifest gives its service account.

use std::collections::BTreeSet;

use super::{http::Request, status::Refusal};

const SERVICE_ACCOUNT: &str = "system:serviceaccount:kube-flannel:flannel";

/// What flannel's `ClusterRole` allows. All else is refused, as a real server does.
const ALLOWED: [(&str, &str); 5] = [
    ("get", "pods"),
    ("get", "nodes"),
    ("list", "nodes"),
    ("watch", "nodes"),
    ("patch", "nodes/status"),
];

/// What a request asks for, in RBAC's words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub verb: &'static str,
    pub resource: &'static str,
    /// Empty for objects of the cluster.
    pub namespace: &'a str,
    /// Empty for lists.
    pub name: &'a str,
}

/// Who may do what.
#[derive(Debug, Default)]
pub(super) struct Access {
    /// Tokens of the service account.
    pub tokens: BTreeSet<String>,
    /// Verbs and resources that have been taken away.
    pub denied: BTreeSet<(String, String)>,
}

impl Access {
    /// Why a request is refused, if it is. `certified`: its connection showed a certificate of
    /// our authority.
    pub fn refusal(&self, request: &Request, certified: bool, asked: Asked<'_>) -> Option<Refusal> {
        let Asked { verb, resource, namespace, name } = asked;
        let user = match request.header("authorization") {
            None if certified => SERVICE_ACCOUNT,
            // A server that lets nobody in without a name says so by RBAC, not by 401.
            None => "system:anonymous",
            Some(header) => {
                let token = header.strip_prefix("Bearer ").unwrap_or_default();
                if !self.tokens.contains(token) {
                    return Some(Refusal::new(401, "Unauthorized", "Unauthorized"));
                }
                SERVICE_ACCOUNT
            }
        };
        let denied = self.denied.contains(&(verb.to_owned(), resource.to_owned()));
        if user == SERVICE_ACCOUNT && ALLOWED.contains(&(verb, resource)) && !denied {
            return None;
        }
        let scope = if namespace.is_empty() {
            "at the cluster scope".to_owned()
        } else {
            format!("in the namespace \"{namespace}\"")
        };
        Some(Refusal::forbidden(user, verb, resource, name, &scope))
    }
}
