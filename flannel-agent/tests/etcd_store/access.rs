//! Authentication and TLS, and what is said when they fail.

use std::{path::Path, process::Command, time::Duration};

use etcd_client::{Permission, RoleGrantPermissionResponse};
use flannel_agent::subnet_manager::{StoreError, SubnetManager};

use super::server::{CONFIG, Etcd, PREFIX, acquire, beside, request, value, with_user};

const OURS: &str = "192.0.2.11";
const SOON: Duration = Duration::from_secs(10);

/// Users `root` and `weft`; weft's role covers only the prefix.
async fn enable_auth(etcd: &Etcd) {
    let mut client = etcd.client().await;
    client.user_add("root", "r", None).await.unwrap();
    client.role_add("root").await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.role_add("weft").await.unwrap();
    let _: RoleGrantPermissionResponse = client
        .role_grant_permission("weft", Permission::read_write(PREFIX).with_prefix())
        .await
        .unwrap();
    client.user_add("weft", "w", None).await.unwrap();
    client.user_grant_role("weft", "weft").await.unwrap();
    client.user_add("guest", "g", None).await.unwrap();
    client.auth_enable().await.unwrap();
}

async fn root(etcd: &Etcd) -> etcd_client::Client {
    let options = etcd_client::ConnectOptions::new().with_user("root", "r");
    etcd_client::Client::connect([etcd.url()], Some(options)).await.unwrap()
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_user_with_short_lived_tokens_leases_watches_and_renews() {
    let etcd = Etcd::empty(&["--auth-token-ttl", "3"]).await;
    etcd.put("config", CONFIG, 0).await;
    enable_auth(&etcd).await;
    let (manager, _) = etcd.manager_with(|options| {
        with_user("weft", "w")(options);
        options.lease_ttl = Duration::from_secs(12);
        options.renew_margin = Duration::from_secs(4);
    });
    let lease = acquire(&manager, &request(OURS, None)).await.unwrap();
    beside(&manager, lease, async |l| {
        l.until(SOON, |l| l.connections.len() == 1).await;
        // Long enough for any token to expire; the renewal is due in between.
        l.until(SOON, |l| l.renewed == 1).await;
        let key = format!("{PREFIX}/subnets/10.77.2.0-24");
        root(&etcd).await.put(key, value("192.0.2.12", "a"), None).await.unwrap();
        l.until(SOON, |l| l.peer("10.77.2.0/24").is_some()).await;
        assert_eq!(l.connections.len(), 1);
    })
    .await;
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn refused_users_get_distinct_messages_without_the_password() {
    let etcd = Etcd::empty(&[]).await;
    etcd.put("config", CONFIG, 0).await;
    // A user where there is no authentication does no harm.
    etcd.manager_with(with_user("weft", "w")).0.network_config().await.unwrap();
    enable_auth(&etcd).await;
    for (user, word) in [
        (Some(("weft", "hunter2")), "refuses user name or password"),
        (Some(("guest", "g")), "denies permission"),
        (None, "wants a user"),
    ] {
        let (manager, _) = etcd.manager_with(|options| {
            if let Some((name, password)) = user {
                with_user(name, password)(options);
            }
        });
        let error = manager.network_config().await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
        assert!(text.contains(word) && text.contains(&etcd.url()), "{text}");
        assert!(!text.contains("hunter2") && !text.contains('\n'), "{text}");
    }
}

fn openssl(dir: &Path, line: &str) {
    let output = Command::new("openssl").current_dir(dir).args(line.split(' ')).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A CA with a server and a client certificate in `dir`, and a CA that signed nothing.
fn certificates(dir: &Path) {
    std::fs::write(dir.join("server.ext"), "subjectAltName=IP:127.0.0.1").unwrap();
    std::fs::write(dir.join("other.ext"), "subjectAltName=DNS:elsewhere.example").unwrap();
    std::fs::write(dir.join("client.ext"), "extendedKeyUsage=clientAuth").unwrap();
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    for ca in ["ca", "stranger"] {
        openssl(
            dir,
            &format!("req -x509 {key} -keyout {ca}.key -out {ca}.crt -subj /CN={ca} -days 2"),
        );
    }
    for name in ["server", "other", "client"] {
        openssl(dir, &format!("req {key} -keyout {name}.key -out {name}.csr -subj /CN={name}"));
        openssl(
            dir,
            &format!(
                "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 \
                 -extfile {name}.ext -out {name}.crt"
            ),
        );
    }
}

/// An etcd with TLS, and the directory of the certificates.
fn tls_etcd(certificate: &str, client_certificates: bool) -> (Etcd, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let path = dir.path().to_owned();
    let file = |name: &str| path.join(name).to_str().unwrap().to_owned();
    let (crt, key, ca) =
        (file(&format!("{certificate}.crt")), file(&format!("{certificate}.key")), file("ca.crt"));
    let mut args = vec!["--cert-file", &crt, "--key-file", &key];
    if client_certificates {
        args.extend(["--client-cert-auth", "--trusted-ca-file", &ca]);
    }
    (Etcd::launched("https", dir, &args), path)
}

/// Asks for the configuration until there is an answer that is not about etcd's start.
async fn first_answer(
    etcd: &Etcd,
    change: impl FnOnce(&mut flannel_agent::subnet_manager::etcd::EtcdOptions),
) -> String {
    let (manager, _) = etcd.manager_with(change);
    for _ in 0..100 {
        let error = manager.network_config().await.unwrap_err();
        if !error.to_string().contains("refuses the connection") {
            return error.to_string();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("etcd did not start");
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_ca_alone_is_enough_for_tls() {
    let (etcd, dir) = tls_etcd("server", false);
    let answer = first_answer(&etcd, |o| o.cafile = Some(dir.join("ca.crt"))).await;
    assert!(answer.contains("no network configuration"), "{answer}");
    let answer = first_answer(&etcd, |o| o.cafile = Some(dir.join("stranger.crt"))).await;
    assert!(
        answer.contains("our CA has not signed") && answer.contains("-etcd-cafile"),
        "{answer}"
    );
    // Plain text to a TLS port, and the other way round.
    let url = etcd.url().replace("https", "http");
    let answer = first_answer(&etcd, |o| o.endpoints = vec![url]).await;
    assert!(answer.contains("https://"), "{answer}");
    let plain = Etcd::empty(&[]).await;
    let url = plain.url().replace("http", "https");
    let answer = first_answer(&plain, |o| {
        o.endpoints = vec![url];
        o.cafile = Some(dir.join("ca.crt"));
    })
    .await;
    assert!(answer.contains("does not speak TLS"), "{answer}");
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_client_certificate_is_shown_and_missed() {
    let (etcd, dir) = tls_etcd("server", true);
    let answer = first_answer(&etcd, |o| {
        o.cafile = Some(dir.join("ca.crt"));
        o.certfile = Some(dir.join("client.crt"));
        o.keyfile = Some(dir.join("client.key"));
    })
    .await;
    assert!(answer.contains("no network configuration"), "{answer}");
    let answer = first_answer(&etcd, |o| o.cafile = Some(dir.join("ca.crt"))).await;
    assert!(answer.contains("-etcd-certfile"), "{answer}");
}

#[tokio::test]
#[ignore = "needs etcd: cargo xtask test"]
async fn a_certificate_for_another_name_is_named_as_that() {
    let (etcd, dir) = tls_etcd("other", false);
    let answer = first_answer(&etcd, |o| o.cafile = Some(dir.join("ca.crt"))).await;
    assert!(answer.contains("not made out to this name"), "{answer}");
}
