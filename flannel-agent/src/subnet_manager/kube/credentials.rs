//! Where the API server is and who we are to it: flags, a pod's service account, kubeconfig files
//! (specification §5.1).

use std::{fs, path::PathBuf};

use kube::{
    Config,
    config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

/// Where credentials come from.
#[derive(Clone, Debug, Default)]
pub(super) struct Credentials {
    /// `--kube-api-url`.
    pub api_url: String,
    /// `--kubeconfig-file`.
    pub kubeconfig: PathBuf,
}

impl Credentials {
    /// Reads them as they are now: flags first, then the pod's service account, then the user's
    /// files. The error says which of them is wrong in what way, without a secret.
    pub(super) async fn load(&self) -> Result<Config, String> {
        let mut config = if !self.kubeconfig.as_os_str().is_empty() {
            self.file().await?
        } else if !self.api_url.is_empty() {
            self.url()?
        } else {
            match Config::incluster() {
                Ok(config) => config,
                Err(in_cluster) => {
                    Config::from_kubeconfig(&KubeConfigOptions::default()).await.map_err(|own| {
                        format!(
                            "there are no credentials for the Kubernetes API: not in a pod \
                             ({in_cluster}), and no kubeconfig ({}); give -kubeconfig-file",
                            explain(&own)
                        )
                    })?
                }
            }
        };
        read_token(&mut config.auth_info)?;
        Ok(config)
    }

    async fn file(&self) -> Result<Config, String> {
        let wrong = |error: KubeconfigError| {
            format!("-kubeconfig-file {}: {}", self.kubeconfig.display(), explain(&error))
        };
        let mut file = Kubeconfig::read_from(&self.kubeconfig).map_err(wrong)?;
        if !self.api_url.is_empty() {
            // In its place, not behind it: the file need not name a server at all then.
            for cluster in file.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
                let tls = cluster.certificate_authority.is_some()
                    || cluster.certificate_authority_data.is_some()
                    || cluster.insecure_skip_tls_verify == Some(true);
                cluster.server = Some(self.given_url(tls)?.to_string());
            }
        }
        Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(wrong)
    }

    /// Another way to the cluster's server. A pod's service account is good for that, too, but is
    /// not told to whoever listens in on a connection without TLS.
    fn url(&self) -> Result<Config, String> {
        let url = self.given_url(false)?;
        if url.scheme_str() == Some("https")
            && let Ok(mut config) = Config::incluster()
        {
            config.cluster_url = url;
            return Ok(config);
        }
        Ok(Config::new(url))
    }

    /// `--kube-api-url`. A bare `HOST:PORT` is taken, as client-go takes it: with TLS if there is
    /// something to check the server by.
    fn given_url(&self, tls: bool) -> Result<http::Uri, String> {
        let given = &self.api_url;
        let text = match (given.contains("://"), tls) {
            (true, _) => given.clone(),
            (false, true) => format!("https://{given}"),
            (false, false) => format!("http://{given}"),
        };
        text.parse::<http::Uri>()
            .ok()
            .filter(|url| url.authority().is_some_and(|authority| !authority.host().is_empty()))
            .ok_or_else(|| "-kube-api-url is not a URL like https://HOST:6443".to_owned())
    }
}

/// Reads the token from its file, which comes before one that stands in the kubeconfig itself.
/// `kube` would read it, too, but takes a line's end for part of it.
fn read_token(auth: &mut AuthInfo) -> Result<(), String> {
    let Some(path) = auth.token_file.take() else { return Ok(()) };
    match fs::read_to_string(&path) {
        Ok(text) if !text.trim().is_empty() => {
            auth.token = Some(text.trim().to_owned().into());
            Ok(())
        }
        _ if auth.token.is_some() => Ok(()),
        Ok(_) => Err(format!("token file {path} is empty")),
        Err(error) => Err(format!("cannot read token file {path}: {error}")),
    }
}

/// An error of a kubeconfig without a piece of the file, which may be a secret.
fn explain(error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::Parse(_) => "it is not a kubeconfig in YAML".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(file: Option<&str>, api_url: &str) -> Result<Config, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let mut credentials = Credentials { api_url: api_url.to_owned(), ..Credentials::default() };
        if let Some(text) = file {
            credentials.kubeconfig = dir.path().join("kubeconfig");
            fs::write(&credentials.kubeconfig, text).expect("written");
            fs::write(dir.path().join("token"), " from the file\n").expect("written");
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(credentials.load())
    }

    fn kubeconfig(cluster: &str, user: &str) -> String {
        format!(
            "{{apiVersion: v1, kind: Config, current-context: c, \
             clusters: [{{name: c, cluster: {{{cluster}}}}}], users: [{{name: u, user: {{{user}}}}}], \
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]}}"
        )
    }

    fn token(config: &Config) -> Option<String> {
        // Debug hides it; what is sent does not.
        serde_json::to_value(&config.auth_info).ok()?["token"].as_str().map(str::to_owned)
    }

    #[test]
    fn the_flag_stands_in_for_the_files_server_even_if_it_has_none() {
        for cluster in ["server: 'https://a:1'", "insecure-skip-tls-verify: true"] {
            let config =
                load(Some(&kubeconfig(cluster, "token: t")), "https://b:2").expect(cluster);
            assert_eq!(config.cluster_url.to_string(), "https://b:2/");
            assert_eq!(token(&config).as_deref(), Some("t"));
        }
        for (cluster, url) in [
            ("insecure-skip-tls-verify: true", "https://b:2/"),
            ("certificate-authority-data: bm9uZQ==", "https://b:2/"),
            ("server: 'https://a:1'", "http://b:2/"),
        ] {
            // The authority is rubbish here, which is found when it is used.
            let config = load(Some(&kubeconfig(cluster, "token: t")), "b:2");
            match config {
                Ok(config) => assert_eq!(config.cluster_url.to_string(), url, "{cluster}"),
                Err(error) => assert!(error.contains("certificate"), "{cluster}: {error}"),
            }
        }
        let error = load(Some(&kubeconfig("", "token: t")), "").expect_err("no server");
        assert!(error.starts_with("-kubeconfig-file /"), "{error}");
    }

    #[test]
    fn a_token_file_comes_first_and_loses_its_line_end() {
        let cluster = "server: 'https://a:1'";
        let config = load(Some(&kubeconfig(cluster, "token: t, tokenFile: token")), "");
        assert_eq!(token(&config.expect("good")).as_deref(), Some("from the file"));
        let config = load(Some(&kubeconfig(cluster, "token: t, tokenFile: none")), "");
        assert_eq!(token(&config.expect("good")).as_deref(), Some("t"));
        let error = load(Some(&kubeconfig(cluster, "tokenFile: none")), "").expect_err("no file");
        assert!(error.contains("cannot read token file") && error.contains("/none"), "{error}");
    }

    #[test]
    fn what_is_no_url_or_no_kubeconfig_is_told_without_its_text() {
        for url in ["apiserver:6443/x y", "/api", "https://"] {
            let error = load(None, url).expect_err(url);
            assert!(error.starts_with("-kube-api-url is not a URL"), "{error}");
        }
        let error = load(Some("token: [secret"), "").expect_err("no YAML");
        assert!(error.contains("not a kubeconfig") && !error.contains("secret"), "{error}");
    }
}
