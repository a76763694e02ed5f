//! The CNI plugin as a runtime calls it, with a delegate that writes down what it is told.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};

const ENV_FILE: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.17.1/24\n\
                        FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

const RESULT: &str = r#"{"cniVersion":"1.0.0","ips":[{"address":"10.1.17.2/24","gateway":"10.1.17.1"}],"routes":[{"dst":"10.1.0.0/16"},{"dst":"fd00::/8"}]}"#;

/// Tells the versions in the file `versions`. Else writes its input and the call's variables to
/// files beside itself, then does what the file `behaviour` says, a shell script.
const DELEGATE: &str = r#"#!/bin/sh
dir=$(dirname "$0")
test $CNI_COMMAND != VERSION || exec cat "$dir/versions"
cat > "$dir/input.$CNI_COMMAND"
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME" >> "$dir/calls"
. "$dir/behaviour"
"#;

/// A directory with a delegate `bridge`, an env file and a place for scratch files.
struct Setting {
    dir: tempfile::TempDir,
}

/// What a call came to.
#[derive(Debug)]
struct Called {
    success: bool,
    stdout: String,
    stderr: String,
}

impl Called {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The error's code and message.
    fn error(&self) -> (u64, String) {
        assert!(!self.success, "{self:?}");
        let error = self.json();
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (error["code"].as_u64().expect("a code"), text("msg") + "; " + &text("details"))
    }
}

impl Setting {
    fn new() -> Self {
        let setting = Self { dir: tempfile::tempdir().expect("a directory") };
        fs::write(setting.path("bridge"), DELEGATE).expect("written");
        fs::set_permissions(setting.path("bridge"), fs::Permissions::from_mode(0o755))
            .expect("executable");
        fs::write(setting.path("subnet.env"), ENV_FILE).expect("written");
        setting.speak(&["0.3.1", "1.0.0", "1.1.0"]);
        setting.behave(&format!("test $CNI_COMMAND = ADD && echo '{RESULT}'; exit 0"));
        setting
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn behave(&self, script: &str) {
        fs::write(self.path("behaviour"), script).expect("written");
    }

    fn speak(&self, versions: &[&str]) {
        let text = json!({"cniVersion": "1.0.0", "supportedVersions": versions}).to_string();
        fs::write(self.path("versions"), text).expect("written");
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path(name)).ok()
    }

    fn config(&self, version: &str) -> Value {
        json!({
            "cniVersion": version, "name": "cbr0", "type": "flannel",
            "subnetFile": self.path("subnet.env"), "dataDir": self.path("data"),
            "delegate": {"isDefaultGateway": true, "hairpinMode": true},
        })
    }

    fn call(&self, command: &str, config: &Value) -> Called {
        let path = self.dir.path().display().to_string();
        let variables = [
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_NETNS", "/nowhere"),
            ("CNI_PATH", &path),
        ];
        call_with(&variables, &config.to_string())
    }
}

/// Calls the plugin with these variables and no others but `PATH`.
fn call_with(variables: &[(&str, &str)], input: &str) -> Called {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flannel"));
    command.env_clear().env("PATH", "/usr/bin:/bin").envs(variables.iter().copied());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("started");
    let mut stdin = child.stdin.take().expect("a pipe");
    // A plugin that refuses before it reads closes the pipe.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().expect("ended");
    Called {
        success: output.status.success(),
        stdout: String::from_utf8(output.stdout).expect("text"),
        stderr: String::from_utf8(output.stderr).expect("text"),
    }
}

#[test]
fn add_and_del_tell_the_delegate_the_same() {
    let setting = Setting::new();
    let config = setting.config("1.0.0");
    let added = setting.call("ADD", &config);
    assert!(added.success, "{added:?}");
    assert_eq!(added.json(), serde_json::from_str::<Value>(RESULT).expect("JSON"));
    assert!(added.stdout.starts_with("{\n    \"cniVersion\""), "{}", added.stdout);
    let told = setting.read("input.ADD").expect("called");
    assert_eq!(
        told,
        r#"{"cniVersion":"1.0.0","hairpinMode":true,"ipMasq":false,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}]],"routes":[{"dst":"10.1.0.0/16"}],"type":"host-local"},"isDefaultGateway":true,"isGateway":true,"mtu":1450,"name":"cbr0","type":"bridge"}"#
    );
    assert_eq!(setting.read("data/c1").as_deref(), Some(&*told));

    // The agent has another subnet, or none, by the time of DEL.
    fs::remove_file(setting.path("subnet.env")).expect("removed");
    let deleted = setting.call("DEL", &config);
    assert!(deleted.success && deleted.stdout.is_empty(), "{deleted:?}");
    assert_eq!(setting.read("input.DEL").as_deref(), Some(&*told));
    assert_eq!(setting.read("data/c1"), None);
    assert!(setting.call("DEL", &config).success, "a second DEL");
    assert_eq!(setting.read("calls").as_deref(), Some("ADD c1 eth0\nDEL c1 eth0\n"));
}

#[test]
fn a_failed_del_can_be_tried_again() {
    let setting = Setting::new();
    let config = setting.config("0.3.1");
    assert!(setting.call("ADD", &config).success);
    setting.behave(r#"echo '{"code":11,"msg":"busy","details":"lock"}'; exit 1"#);
    let (code, text) = setting.call("DEL", &config).error();
    assert_eq!(code, 11);
    assert!(text.contains("bridge: busy; lock"), "{text}");
    assert!(setting.read("data/c1").is_some(), "forgotten too early");
    setting.behave("exit 0");
    assert!(setting.call("DEL", &config).success);
    assert_eq!(setting.read("calls").as_deref(), Some("ADD c1 eth0\nDEL c1 eth0\nDEL c1 eth0\n"));
    assert_eq!(fs::read_dir(setting.path("data")).expect("there").count(), 0);
}

#[test]
fn a_failed_add_is_undone_by_del() {
    let setting = Setting::new();
    let config = setting.config("1.0.0");
    setting.behave("echo words >&2; exit 3");
    let called = setting.call("ADD", &config);
    let (code, text) = called.error();
    assert_eq!(code, 999);
    assert!(text.contains("words") && called.stderr.contains("words"), "{called:?}");
    setting.behave("echo no json");
    assert_eq!(setting.call("ADD", &config).error().0, 6);
    setting.behave("exit 0");
    assert!(setting.call("DEL", &config).success);
    assert!(setting.read("calls").expect("called").ends_with("DEL c1 eth0\n"));
}

#[test]
fn without_a_subnet_the_runtime_is_to_try_again() {
    let setting = Setting::new();
    fs::remove_file(setting.path("subnet.env")).expect("removed");
    let env = setting.path("subnet.env").display().to_string();
    let known = format!("open {env}: no such file or directory");
    let (code, text) = setting.call("ADD", &setting.config("1.0.0")).error();
    assert_eq!(code, 11);
    assert!(text.starts_with(&known), "{text}");
    let (code, text) = setting.call("STATUS", &setting.config("1.1.0")).error();
    assert_eq!(code, 50);
    assert!(text.starts_with(&known), "{text}");
    fs::write(&env, "FLANNEL_MTU=1450\n").expect("written");
    let (code, text) = setting.call("ADD", &setting.config("1.0.0")).error();
    assert_eq!(code, 7);
    assert!(text.contains("is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET"));
    assert!(setting.read("calls").is_none() && !setting.path("data").exists());
}

#[test]
fn check_gives_the_delegate_the_earlier_result() {
    let setting = Setting::new();
    let mut config = setting.config("1.0.0");
    config["prevResult"] = serde_json::from_str(RESULT).expect("JSON");
    assert_eq!(setting.call("CHECK", &config).error().0, 3, "no such container");
    assert!(setting.call("ADD", &config).success);
    assert!(!setting.read("input.ADD").expect("called").contains("prevResult"));
    let checked = setting.call("CHECK", &config);
    assert!(checked.success && checked.stdout.is_empty(), "{checked:?}");
    let told: Value =
        serde_json::from_str(&setting.read("input.CHECK").expect("called")).expect("JSON");
    let mut wanted = config["prevResult"].clone();
    wanted["routes"][0]["gw"] = json!("10.1.17.1");
    assert_eq!(told["prevResult"], wanted);
    setting.behave(r#"echo '{"code":100,"msg":"the address is gone"}'; exit 1"#);
    let (code, text) = setting.call("CHECK", &config).error();
    assert!(code == 100 && text.contains("the address is gone"), "{code} {text}");
    assert_eq!(setting.call("CHECK", &setting.config("1.0.0")).error().0, 7, "no prevResult");
    assert_eq!(setting.call("CHECK", &setting.config("0.3.1")).error().0, 1, "too old");
}

#[test]
fn every_version_has_the_commands_that_its_specification_knows() {
    let setting = Setting::new();
    let path = setting.dir.path().display().to_string();
    for (version, checks, collects) in [
        ("0.1.0", false, false),
        ("0.2.0", false, false),
        ("0.3.0", false, false),
        ("0.3.1", false, false),
        ("0.4.0", true, false),
        ("1.0.0", true, false),
        ("1.1.0", true, true),
    ] {
        setting.speak(&[version]);
        let result = RESULT.replace("1.0.0", version);
        setting.behave(&format!("test $CNI_COMMAND = ADD && echo '{result}'; exit 0"));
        let config = setting.config(version);
        let told = |command: &str| -> Value {
            let text = setting.read(&format!("input.{command}")).expect("called");
            serde_json::from_str(&text).expect("JSON")
        };
        let added = setting.call("ADD", &config);
        assert!(added.success, "{version}: {added:?}");
        assert_eq!(
            (&added.json()["cniVersion"], &told("ADD")["cniVersion"]),
            (&json!(version), &json!(version))
        );

        let mut again = config.clone();
        again["prevResult"] = added.json();
        let checked = setting.call("CHECK", &again);
        if checks {
            assert!(checked.success && checked.stdout.is_empty(), "{version}: {checked:?}");
            assert_eq!(told("CHECK")["cniVersion"], version);
        } else {
            assert_eq!(checked.error().0, 1, "{version}: {checked:?}");
        }
        let mut listing = config.clone();
        listing["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "eth0"}]);
        for (command, config) in [("STATUS", &config), ("GC", &listing)] {
            let variables = [("CNI_COMMAND", command), ("CNI_PATH", path.as_str())];
            let called = call_with(&variables, &config.to_string());
            if collects {
                assert!(called.success && called.stdout.is_empty(), "{version}: {called:?}");
                assert_eq!(told(command)["cniVersion"], version);
            } else {
                assert_eq!(called.error().0, 1, "{version} {command}: {called:?}");
            }
        }
        let deleted = setting.call("DEL", &config);
        assert!(deleted.success && deleted.stdout.is_empty(), "{version}: {deleted:?}");
        assert_eq!(setting.read("data/c1"), None, "{version}");
    }
}

#[test]
fn what_is_for_the_next_plugin_of_the_chain_stays_out_of_the_delegate() {
    let setting = Setting::new();
    let mut config = setting.config("1.0.0");
    config["runtimeConfig"] = json!({"bandwidth": {"ingressRate": 1}});
    for (key, value) in [
        ("capabilities", json!({"portMappings": true})),
        ("args", json!({"cni": {"ips": ["10.1.17.9"]}})),
        ("dns", json!({"nameservers": ["10.96.0.10"]})),
        ("prevResult", serde_json::from_str(RESULT).expect("JSON")),
    ] {
        config[key] = value;
    }
    assert!(setting.call("ADD", &config).success);
    let told: Value =
        serde_json::from_str(&setting.read("input.ADD").expect("called")).expect("JSON");
    assert_eq!(told["runtimeConfig"], config["runtimeConfig"]);
    for key in ["capabilities", "args", "dns", "prevResult"] {
        assert!(told[key].is_null(), "{key}: {told}");
    }
}

#[test]
fn garbage_is_what_the_runtime_does_not_list() {
    let setting = Setting::new();
    let path = setting.dir.path().display().to_string();
    for (id, name) in [("c1", "cbr0"), ("c2", "cbr0"), ("c3", "other")] {
        let mut config = setting.config("1.1.0");
        config["name"] = json!(name);
        let variables = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", id),
            ("CNI_IFNAME", "net7"),
            ("CNI_NETNS", "/nowhere"),
            ("CNI_PATH", &path),
        ];
        assert!(call_with(&variables, &config.to_string()).success);
    }
    let mut config = setting.config("1.1.0");
    let gc = [("CNI_COMMAND", "GC"), ("CNI_PATH", path.as_str())];
    assert_eq!(call_with(&gc, &config.to_string()).error().0, 7, "no list");
    config["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "net7"}]);
    fs::remove_file(setting.path("calls")).expect("called");
    setting.behave(r#"test $CNI_COMMAND = DEL || exit 0; echo '{"code":5,"msg":"no"}'; exit 1"#);
    let (_, text) = call_with(&gc, &config.to_string()).error();
    assert!(text.contains("c2: delegate bridge: no"), "{text}");
    setting.behave("exit 0");
    let called = call_with(&gc, &config.to_string());
    assert!(called.success, "{called:?}");
    assert_eq!(
        setting.read("calls").as_deref(),
        Some("DEL c2 net7\nGC  \nDEL c2 net7\nGC  \n"),
        "of c1 and c3 nothing is to be cleaned up"
    );
    assert!(setting.read("data/c1").is_some() && setting.read("data/c3").is_some());
    assert!(setting.read("data/c2").is_none());
    let told: Value =
        serde_json::from_str(&setting.read("input.GC").expect("called")).expect("JSON");
    assert_eq!(told["cni.dev/valid-attachments"], config["cni.dev/valid-attachments"]);
    // A delegate that is older than GC is not bothered.
    setting.speak(&["1.0.0"]);
    fs::remove_file(setting.path("calls")).expect("called");
    assert!(call_with(&gc, &config.to_string()).success);
    assert_eq!(setting.read("calls"), None);
}

#[test]
fn a_ready_node_says_nothing() {
    let setting = Setting::new();
    let called = setting.call("STATUS", &setting.config("1.1.0"));
    assert!(called.success && called.stdout.is_empty(), "{called:?}");
    setting.behave(r#"echo '{"code":51,"msg":"limited"}'; exit 1"#);
    let (code, text) = setting.call("STATUS", &setting.config("1.1.0")).error();
    assert!(code == 50 && text.contains("limited"), "{code} {text}");
    assert_eq!(setting.call("STATUS", &setting.config("1.0.0")).error().0, 1);
    setting.speak(&["0.4.0", "1.0.0"]);
    let (code, text) = setting.call("STATUS", &setting.config("1.1.0")).error();
    assert!(code == 50 && text.contains("it speaks 0.4.0, 1.0.0"), "{code} {text}");
}

#[test]
fn wrong_calls_get_their_codes() {
    let setting = Setting::new();
    let config = setting.config("1.0.0").to_string();
    let all = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", "/proc/self/ns/net"),
        ("CNI_PATH", "/nowhere"),
    ];
    let with = |name: &str, value: &'static str| {
        all.map(|(n, v)| if n == name { (n, value) } else { (n, v) })
    };
    for (variables, code, word) in [
        (with("CNI_COMMAND", "PURGE"), 4, "PURGE"),
        (with("CNI_CONTAINERID", ""), 4, "[CNI_CONTAINERID]"),
        (with("CNI_CONTAINERID", "../c"), 4, "../c"),
        (with("CNI_IFNAME", "a/b"), 4, "a/b"),
        (with("CNI_IFNAME", "sixteen-letters-"), 4, "15 bytes"),
        (all, 8, "should not be the same"),
        (with("CNI_NETNS", "/nowhere"), 7, "failed to find plugin \"bridge\" in path [/nowhere]"),
    ] {
        let (got, text) = call_with(&variables, &config).error();
        assert!(got == code && text.contains(word), "{variables:?}: {got} {text}");
    }
    let (code, text) = call_with(&with("CNI_NETNS", "/nowhere"), "{").error();
    assert!(code == 6 && text.contains("failed to load netconf"), "{text}");
}

#[test]
fn by_hand_it_introduces_itself_and_versions_are_told() {
    let called = call_with(&[], "");
    assert!(called.success && called.stdout.is_empty(), "{called:?}");
    assert!(called.stderr.starts_with("CNI Plugin flannel version "), "{called:?}");
    let called = call_with(&[("CNI_COMMAND", "VERSION")], "");
    let versions = called.json();
    assert_eq!(versions["cniVersion"], "1.1.0");
    let supported = versions["supportedVersions"].as_array().expect("a list");
    assert!(
        ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"].iter().all(|v| supported.contains(&json!(v)))
    );
}

#[test]
fn a_scratch_file_of_rubbish_stops_nobody() {
    let setting = Setting::new();
    fs::create_dir(setting.path("data")).expect("made");
    fs::write(setting.path("data/c1"), "rubbish").expect("written");
    let called = setting.call("DEL", &setting.config("1.0.0"));
    assert!(called.success && called.stderr.contains("is not JSON"), "{called:?}");
    assert!(Path::new(&setting.path("data/c1")).exists());
}
