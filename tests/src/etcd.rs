//! A real etcd and its JSON gateway.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    base64, http,
    lab::{Lab, Segment},
    lease_store::{CONFIG_KEY, LeaseStore, SUBNETS_PREFIX},
    node::Node,
    process::{self, Process},
    wait::eventually,
};

/// How to run etcd.
#[derive(Clone, Debug, Default)]
pub struct EtcdOptions {
    /// TLS towards clients; a client certificate is asked for as well if this says so.
    pub tls: Option<ClientCertificates>,
    /// Host number on segment A; 5 unless set.
    pub number: Option<u8>,
    /// Whether it serves the old v2 API as well.
    pub v2: bool,
}

/// Whether etcd asks its clients for certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Only the server shows one.
    NotAsked,
    /// Clients have to show one of the same authority.
    Required,
}

/// One state that a key went through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The revision that wrote it.
    pub revision: i64,
    /// The value.
    pub value: String,
    /// The etcd lease it was attached to; 0 for none.
    pub lease: i64,
}

/// etcd on a host of its own. Clients reach it at `http(s)://192.0.2.5:2379`; the lab itself
/// through a plain port on that host's loopback.
#[derive(Debug)]
pub struct Etcd {
    node: Node,
    process: RefCell<Option<Process>>,
    options: EtcdOptions,
    certificates: Option<Certificates>,
    token: RefCell<Option<String>>,
    starts: Cell<u32>,
}

/// Files of a throw-away authority.
#[derive(Debug)]
pub struct Certificates {
    dir: PathBuf,
}

impl Certificates {
    /// An authority, a server certificate for `address` and a client certificate.
    fn new(dir: &Path, address: &str) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let this = Self { dir: dir.to_owned() };
        let path = |name: &str| this.file(name).display().to_string();
        openssl(&[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=lab authority",
            "-keyout",
            &path("ca.key"),
            "-out",
            &path("ca.pem"),
        ])?;
        for (name, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
            fs::write(
                this.file(&format!("{name}.ext")),
                format!("subjectAltName=IP:{address},IP:127.0.0.1\nextendedKeyUsage={usage}\n"),
            )?;
            openssl(&[
                "req",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-subj",
                &format!("/CN=lab {name}"),
                "-keyout",
                &path(&format!("{name}.key")),
                "-out",
                &path(&format!("{name}.csr")),
            ])?;
            openssl(&[
                "x509",
                "-req",
                "-days",
                "2",
                "-in",
                &path(&format!("{name}.csr")),
                "-CA",
                &path("ca.pem"),
                "-CAkey",
                &path("ca.key"),
                "-CAcreateserial",
                "-extfile",
                &path(&format!("{name}.ext")),
                "-out",
                &path(&format!("{name}.pem")),
            ])?;
        }
        Ok(this)
    }

    /// `ca.pem`, `server.pem`, `server.key`, `client.pem`, `client.key`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

fn openssl(arguments: &[&str]) -> Result<()> {
    process::output(Command::new("openssl").args(arguments)).map(drop)
}

impl Etcd {
    /// Starts a plain etcd at 192.0.2.5.
    pub fn new(lab: &Lab) -> Result<Self> {
        Self::with(lab, EtcdOptions::default())
    }

    /// Starts etcd.
    pub fn with(lab: &Lab, options: EtcdOptions) -> Result<Self> {
        let number = options.number.unwrap_or(5);
        let node = lab.node_at(&format!("etcd{number}"), Segment::A, number)?;
        let certificates = options
            .tls
            .map(|_| Certificates::new(&node.dir().join("certificates"), &node.v4()))
            .transpose()?;
        let etcd = Self {
            node,
            process: RefCell::default(),
            options,
            certificates,
            token: RefCell::default(),
            starts: Cell::default(),
        };
        etcd.start()?;
        Ok(etcd)
    }

    /// Starts it again on the same data.
    pub fn start(&self) -> Result<()> {
        let scheme = if self.certificates.is_some() { "https" } else { "http" };
        let mut command = self.node.command("etcd");
        command
            .arg("--name=lab")
            .arg(format!("--data-dir={}", self.node.dir().join("data").display()))
            .arg(format!(
                "--listen-client-urls={scheme}://{}:2379,http://127.0.0.1:2378",
                self.node.v4()
            ))
            .arg(format!("--advertise-client-urls={scheme}://{}:2379", self.node.v4()))
            .args(["--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync"])
            .args(["--logger=zap", "--log-level=warn", "--auth-token-ttl=5"]);
        if let Some(certificates) = &self.certificates {
            for (flag, name) in [("cert-file", "server.pem"), ("key-file", "server.key")] {
                command.arg(format!("--{flag}={}", certificates.file(name).display()));
            }
            if self.options.tls == Some(ClientCertificates::Required) {
                let authority = certificates.file("ca.pem");
                command
                    .arg("--client-cert-auth")
                    .arg(format!("--trusted-ca-file={}", authority.display()));
            }
        }
        if self.options.v2 {
            command.arg("--enable-v2");
        }
        self.starts.set(self.starts.get() + 1);
        let log = self.node.dir().join("etcd.log");
        let mut process = Process::spawn(command, &log, self.node.lab().run().keeps())?;
        eventually("etcd answers", Duration::from_secs(15), || {
            if let Some(status) = process.exited()? {
                bail!("it has ended: {status}");
            }
            let health = self.node.http_get(2378, "/health")?;
            Ok(health.body.contains("true").then_some(()))
        })
        .with_context(|| process.log_tail(10))?;
        *self.process.borrow_mut() = Some(process);
        Ok(())
    }

    /// Ends it; the data stay.
    pub fn stop(&self) -> Result<()> {
        if let Some(mut process) = self.process.borrow_mut().take() {
            process.kill()?;
        }
        Ok(())
    }

    /// Freezes it: connections stay open and nothing is answered.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Ends a freeze.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.process.borrow().as_ref().context("etcd is not running")?.signal(signal)
    }

    /// The host it runs on.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The certificates, if it has TLS.
    pub fn certificates(&self) -> Result<&Certificates> {
        self.certificates.as_ref().context("this etcd has no TLS")
    }

    /// The endpoint for clients.
    pub fn endpoint(&self) -> String {
        let scheme = if self.certificates.is_some() { "https" } else { "http" };
        format!("{scheme}://{}:2379", self.node.v4())
    }

    /// A call of the JSON gateway, `/v3` left out.
    pub fn call(&self, path: &str, body: &Value) -> Result<Value> {
        let path = format!("/v3{path}");
        let body = body.to_string();
        let token = self.token.borrow().clone();
        let answer = self
            .node
            .ns()
            .within(|| http::post("127.0.0.1:2378", &path, token.as_deref(), &body))?;
        ensure!(answer.status == 200, "etcd {path}: {} {}", answer.status, answer.body.trim());
        serde_json::from_str(&answer.body).with_context(|| format!("etcd {path}: {}", answer.body))
    }

    /// Writes a key without an etcd lease.
    pub fn put(&self, key: &str, value: &str) -> Result<i64> {
        self.put_with_lease(key, value, 0)
    }

    /// Writes a key attached to an etcd lease. Returns the revision.
    pub fn put_with_lease(&self, key: &str, value: &str, lease: i64) -> Result<i64> {
        let answer = self.call(
            "/kv/put",
            &json!({
                "key": base64::encode(key.as_bytes()),
                "value": base64::encode(value.as_bytes()),
                "lease": lease.to_string(),
            }),
        )?;
        number(&answer["header"]["revision"]).context("no revision")
    }

    /// Writes several keys in one transaction.
    pub fn put_all(&self, pairs: &[(String, String)]) -> Result<()> {
        let success: Vec<_> = pairs
            .iter()
            .map(|(key, value)| {
                json!({"requestPut": {
                    "key": base64::encode(key.as_bytes()),
                    "value": base64::encode(value.as_bytes()),
                }})
            })
            .collect();
        self.call("/kv/txn", &json!({ "success": success })).map(drop)
    }

    /// Writes a key with the v2 API, for `ttl` seconds if there is one.
    pub fn put_v2(&self, key: &str, value: &str, ttl: Option<u32>) -> Result<()> {
        let escaped: Vec<_> = value.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let escaped = escaped.concat();
        let ttl = ttl.map(|ttl| format!("&ttl={ttl}")).unwrap_or_default();
        let body = format!("value={escaped}{ttl}");
        self.call_v2(&format!("/keys{key}"), "application/x-www-form-urlencoded", &body, false)
    }

    /// From now on `user` may read below the network's prefix with the v2 API by this password,
    /// and nobody else but root.
    pub fn require_password_v2(&self, user: &str, password: &str) -> Result<()> {
        const JSON: &str = "application/json";
        let call = |path: &str, body: Value, root| {
            self.call_v2(&format!("/auth{path}"), JSON, &body.to_string(), root)
        };
        let rights = json!({"kv": {"read": ["/coreos.com/*"], "write": []}});
        call("/users/root", json!({"user": "root", "password": "root"}), false)?;
        call("/roles/reader", json!({"role": "reader", "permissions": rights}), false)?;
        let user_body = json!({"user": user, "password": password, "roles": ["reader"]});
        call(&format!("/users/{user}"), user_body, false)?;
        call("/enable", json!({}), false)?;
        let all = json!({"kv": {"read": ["/*"], "write": ["/*"]}});
        call("/roles/guest", json!({"role": "guest", "revoke": all}), true)
    }

    fn call_v2(&self, path: &str, content_type: &str, body: &str, root: bool) -> Result<()> {
        let path = format!("/v2{path}");
        let authorization = format!("Basic {}", base64::encode(b"root:root"));
        let authorization = root.then_some(authorization.as_str());
        let answer = self
            .node
            .ns()
            .within(|| http::put("127.0.0.1:2378", &path, authorization, content_type, body))?;
        ensure!(
            (200..300).contains(&answer.status),
            "etcd {path}: {} {}",
            answer.status,
            answer.body.trim()
        );
        Ok(())
    }

    /// Deletes a key. Returns whether there was one.
    pub fn delete(&self, key: &str) -> Result<bool> {
        let answer =
            self.call("/kv/deleterange", &json!({"key": base64::encode(key.as_bytes())}))?;
        Ok(number(&answer["deleted"]) == Some(1))
    }

    /// Grants an etcd lease of `ttl` seconds.
    pub fn grant(&self, ttl: i64) -> Result<i64> {
        let answer = self.call("/lease/grant", &json!({"TTL": ttl.to_string()}))?;
        number(&answer["ID"]).context("no lease id")
    }

    /// Ends an etcd lease and its keys.
    pub fn revoke(&self, lease: i64) -> Result<()> {
        self.call("/lease/revoke", &json!({"ID": lease.to_string()})).map(drop)
    }

    /// Seconds an etcd lease has left; -1 if it is no more.
    pub fn time_to_live(&self, lease: i64) -> Result<i64> {
        let answer = self.call("/lease/timetolive", &json!({"ID": lease.to_string()}))?;
        Ok(number(&answer["TTL"]).unwrap_or(0))
    }

    /// All keys below a prefix.
    pub fn list(&self, prefix: &str) -> Result<BTreeMap<String, Version>> {
        let mut end = prefix.as_bytes().to_vec();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        let answer = self.call(
            "/kv/range",
            &json!({"key": base64::encode(prefix.as_bytes()), "range_end": base64::encode(&end)}),
        )?;
        let mut found = BTreeMap::new();
        for pair in answer["kvs"].as_array().into_iter().flatten() {
            found.insert(text(&pair["key"])?, version(pair)?);
        }
        Ok(found)
    }

    /// A key's state now.
    pub fn get(&self, key: &str) -> Result<Option<Version>> {
        self.get_at(key, 0)
    }

    fn get_at(&self, key: &str, revision: i64) -> Result<Option<Version>> {
        let answer = self.call(
            "/kv/range",
            &json!({
                "key": base64::encode(key.as_bytes()),
                "revision": revision.to_string(),
            }),
        )?;
        answer["kvs"].get(0).map(version).transpose()
    }

    /// Every state a key went through after revision `since`, oldest first; deletions are left
    /// out.
    pub fn history(&self, key: &str, since: i64) -> Result<Vec<Version>> {
        let answer = self.call("/kv/range", &json!({"key": base64::encode(b"no such key")}))?;
        let now = number(&answer["header"]["revision"]).context("no revision")?;
        let mut found: Vec<Version> = Vec::new();
        for revision in since + 1..=now {
            if let Some(version) = self.get_at(key, revision)?
                && version.revision > since
                && found.last().is_none_or(|last| last.revision != version.revision)
            {
                found.push(version);
            }
        }
        Ok(found)
    }

    /// Forgets the history up to now.
    pub fn compact(&self) -> Result<()> {
        let answer = self.call("/kv/range", &json!({"key": base64::encode(b"no such key")}))?;
        let now = number(&answer["header"]["revision"]).context("no revision")?;
        self.call("/kv/compaction", &json!({"revision": now.to_string(), "physical": true}))
            .map(drop)
    }

    /// From now on `user` may work below the network's prefix by this password, and nobody may
    /// do anything without one. The lab itself goes on as root.
    pub fn require_password(&self, user: &str, password: &str) -> Result<()> {
        self.call("/auth/user/add", &json!({"name": "root", "password": "root"}))?;
        self.call("/auth/role/add", &json!({"name": "root"}))?;
        self.call("/auth/user/grant", &json!({"user": "root", "role": "root"}))?;
        self.call("/auth/user/add", &json!({"name": user, "password": password}))?;
        self.call("/auth/role/add", &json!({"name": "network"}))?;
        self.call(
            "/auth/role/grant",
            &json!({"name": "network", "perm": {
                "permType": "READWRITE",
                "key": base64::encode(b"/coreos.com/network/"),
                "range_end": base64::encode(b"/coreos.com/network0"),
            }}),
        )?;
        self.call("/auth/user/grant", &json!({"user": user, "role": "network"}))?;
        self.call("/auth/enable", &json!({}))?;
        self.log_in()
    }

    /// Gets a new token for the lab's own calls; tokens last five seconds when not used.
    pub fn log_in(&self) -> Result<()> {
        *self.token.borrow_mut() = None;
        let answer =
            self.call("/auth/authenticate", &json!({"name": "root", "password": "root"}))?;
        let token = answer["token"].as_str().context("no token")?.to_owned();
        *self.token.borrow_mut() = Some(token);
        Ok(())
    }
}

impl LeaseStore for Etcd {
    fn flags(&self) -> Vec<String> {
        vec![format!("--etcd-endpoints={}", self.endpoint())]
    }

    fn put_config(&self, text: &str) -> Result<()> {
        self.put(CONFIG_KEY, text).map(drop)
    }

    fn put_lease(&self, key: &str, lease: &Value) -> Result<()> {
        self.put(&format!("{SUBNETS_PREFIX}{key}"), &lease.to_string()).map(drop)
    }

    fn delete_lease(&self, key: &str) -> Result<()> {
        self.delete(&format!("{SUBNETS_PREFIX}{key}")).map(drop)
    }

    fn leases(&self) -> Result<BTreeMap<String, Value>> {
        self.list(SUBNETS_PREFIX)?
            .into_iter()
            .map(|(key, version)| {
                let lease = serde_json::from_str(&version.value)
                    .with_context(|| format!("{key}: {}", version.value))?;
                Ok((key.trim_start_matches(SUBNETS_PREFIX).to_owned(), lease))
            })
            .collect()
    }
}

/// The gateway writes 64-bit numbers as text and leaves out zeros.
fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

fn text(value: &Value) -> Result<String> {
    let bytes = base64::decode(value.as_str().unwrap_or_default())?;
    String::from_utf8(bytes).context("not text")
}

fn version(pair: &Value) -> Result<Version> {
    Ok(Version {
        revision: number(&pair["mod_revision"]).context("no revision")?,
        value: text(&pair["value"])?,
        lease: number(&pair["lease"]).unwrap_or(0),
    })
}
