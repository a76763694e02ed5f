//! What the options say about reaching etcd, checked.

use tracing::warn;

use super::{
    EtcdOptions,
    endpoint::{Endpoint, Password, TlsFiles},
};
use crate::subnet_manager::StoreError;

/// Endpoints and credentials.
pub(super) struct Access {
    /// At least one.
    pub endpoints: Vec<Endpoint>,
    /// Files for those with TLS.
    pub tls: TlsFiles,
    /// Whose name calls are made in.
    pub user: Option<(String, Password)>,
}

/// Checks the options; contacts nobody.
///
/// # Errors
/// [`StoreError::Fatal`] for unusable endpoint URLs, unreadable TLS files, and a password without
/// a user.
pub(super) fn access(options: &EtcdOptions) -> Result<Access, StoreError> {
    let set = |path: &Option<std::path::PathBuf>| {
        path.clone().filter(|path| !path.as_os_str().is_empty())
    };
    let tls = TlsFiles {
        key: set(&options.keyfile),
        cert: set(&options.certfile),
        ca: set(&options.cafile),
    };
    let endpoints = Endpoint::parse_all(&options.endpoints, &tls).map_err(StoreError::Fatal)?;
    let name = options.username.clone().filter(|name| !name.is_empty());
    let password = options.password.clone().filter(|password| !password.is_empty());
    let user = match (name, password) {
        (Some(name), Some(password)) => Some((name, password)),
        (None, Some(_)) => {
            return Err(StoreError::Fatal(
                "-etcd-password is given without -etcd-username: give both".to_owned(),
            ));
        }
        (Some(name), None) => {
            // As flanneld does: both or no authentication.
            warn!("-etcd-username {name} is ignored: there is no -etcd-password");
            None
        }
        (None, None) => None,
    };
    Ok(Access { endpoints, tls, user })
}
