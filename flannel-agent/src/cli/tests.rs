use std::{collections::BTreeMap, ffi::OsString, os::unix::ffi::OsStringExt};

use super::{
    flags::{BindAddress, DatapathMode, FastPath, LogFormat, PeerFilter, XdpMode},
    *,
};

/// Flanneld's flags with their defaults, as specification §1.1 has them.
const FLANNELD: &[(&str, &str)] = &[
    ("etcd-endpoints", "http://127.0.0.1:4001,http://127.0.0.1:2379"),
    ("etcd-prefix", "/coreos.com/network"),
    ("etcd-keyfile", ""),
    ("etcd-certfile", ""),
    ("etcd-cafile", ""),
    ("etcd-username", ""),
    ("etcd-password", ""),
    ("iface-can-reach", ""),
    ("subnet-file", "/run/flannel/subnet.env"),
    ("public-ip", ""),
    ("public-ipv6", ""),
    ("subnet-lease-renew-margin", "60"),
    ("ip-masq", "false"),
    ("ip-masq-fully-random-disable", "false"),
    ("kube-subnet-mgr", "false"),
    ("kube-api-url", ""),
    ("kube-annotation-prefix", "flannel.alpha.coreos.com"),
    ("kubeconfig-file", ""),
    ("version", "false"),
    ("healthz-ip", "0.0.0.0"),
    ("healthz-port", "0"),
    ("iptables-resync", "5"),
    ("iptables-forward-rules", "true"),
    ("ip-blackhole-route", "false"),
    ("net-config-path", "/etc/kube-flannel/net-conf.json"),
    ("set-node-network-unavailable", "true"),
    ("v", "0"),
    ("vmodule", ""),
    ("log_backtrace_at", ""),
];

/// Our own flags.
const OURS: &[(&str, &str)] = &[
    ("datapath", "auto"),
    ("fast-path", "auto"),
    ("flow-interval-ms", "1000"),
    ("xdp", "off"),
    ("peer-filter", "default"),
    ("bpf-pin-dir", "/sys/fs/bpf/flannel"),
    ("local-subnet-mgr", ""),
    ("forward-position", "last"),
    ("state-dir", "/var/lib/flannel"),
    ("control-socket", "/run/flannel/agent.sock"),
    ("metrics-address", ""),
    ("log-format", "text"),
];

const NO_ENV: Environment<'static> = &|_| None;

fn parse_line(line: &str, env: Environment<'_>) -> Result<Command, Exit> {
    parse(line.split_whitespace().map(OsString::from), env)
}

fn run_with(line: &str, env: &[(&str, &str)]) -> Options {
    let env: BTreeMap<_, _> = env.iter().copied().collect();
    match parse_line(line, &|name| env.get(name).map(OsString::from)) {
        Ok(Command::Run(options)) => *options,
        other => panic!("{line:?}: {other:?}"),
    }
}

fn run(line: &str) -> Options {
    run_with(line, &[])
}

fn exit(line: &str) -> Exit {
    parse_line(line, NO_ENV).expect_err(line)
}

#[test]
fn every_flag_has_the_specified_default() {
    let options = run("");
    let effective: BTreeMap<_, _> = options
        .effective
        .iter()
        .map(|word| word.strip_prefix("--").and_then(|w| w.split_once('=')).expect("--name=value"))
        .collect();
    let wanted: BTreeMap<_, _> = FLANNELD.iter().chain(OURS).copied().collect();
    assert_eq!(effective, wanted);
    assert!(options.interface.iface.is_empty() && options.interface.iface_regex.is_empty());
    assert!(options.notes.is_empty());
    assert_eq!(options.telemetry.health_address(), None);
    assert_eq!(
        options.etcd.endpoints().collect::<Vec<_>>(),
        ["http://127.0.0.1:4001", "http://127.0.0.1:2379"]
    );
}

#[test]
fn help_lists_every_flag_and_command() {
    for line in ["-h", "--help", "-help", "-ip-masq -h"] {
        let help = exit(line);
        assert_eq!(help.code, 0);
        for (flag, default) in
            FLANNELD.iter().chain(OURS).chain(&[("iface", ""), ("iface-regex", "")])
        {
            assert!(help.message.contains(&format!("--{flag}")), "{flag} in {}", help.message);
            assert!(help.message.contains(default), "{default}");
        }
        for subcommand in SUBCOMMANDS {
            assert!(help.message.contains(subcommand.name));
        }
    }
}

#[test]
fn flags_take_one_dash_or_two_and_equals_or_space() {
    for line in ["-etcd-prefix /a", "--etcd-prefix /a", "-etcd-prefix=/a", "--etcd-prefix=/a"] {
        assert_eq!(run(line).etcd.prefix, "/a", "{line}");
    }
    // The next word is the value whatever it looks like; the last of several wins.
    assert_eq!(run("-etcd-username -v -v 2").etcd.username, "-v");
    assert_eq!(run("-healthz-port -1").telemetry.healthz_port, -1);
    assert_eq!(run("-v 1 --v=4").log.verbosity, 4);
    assert_eq!(run("--etcd-prefix=/a=b").etcd.prefix, "/a=b");
    assert_eq!(run("-public-ip=192.0.2.1 -public-ip=").interface.public_ip, "");
}

#[test]
fn booleans_are_gos() {
    for (line, value) in [
        ("-ip-masq", true),
        ("--ip-masq", true),
        ("-ip-masq=false", false),
        ("--ip-masq=0", false),
        ("--ip-masq=f", false),
        ("--ip-masq=F", false),
        ("--ip-masq=FALSE", false),
        ("--ip-masq=False", false),
        ("--ip-masq=1", true),
        ("--ip-masq=t", true),
        ("--ip-masq=T", true),
        ("--ip-masq=TRUE", true),
        ("--ip-masq=true", true),
        ("--ip-masq=True", true),
        ("-ip-masq -ip-masq=false", false),
    ] {
        assert_eq!(run(line).firewall.ip_masq, value, "{line}");
    }
    assert!(!run("-iptables-forward-rules=false").firewall.forward_rules);
    for line in ["--ip-masq=yes", "--ip-masq=", "--ip-masq=tRUE"] {
        let exit = exit(line);
        assert_eq!(exit.code, 2, "{line}");
        assert!(exit.message.contains("--ip-masq"), "{}", exit.message);
    }
}

#[test]
fn repeatable_flags_keep_their_order() {
    let options =
        run("-iface eth1 --iface=192.0.2.1 -iface-regex ^10 -iface-regex=eth.* -v 1 -v 2");
    assert_eq!(options.interface.iface, ["eth1", "192.0.2.1"]);
    assert_eq!(options.interface.iface_regex, ["^10", "eth.*"]);
}

#[test]
fn reading_stops_at_the_first_other_word() {
    let options = run("-ip-masq false -v 3");
    assert!(options.firewall.ip_masq);
    assert_eq!(options.log.verbosity, 0);
    assert!(matches!(&options.notes[..], [Note::Warning(text)] if text.contains("\"false\"")));
    assert_eq!(run("-v 1 -- -v 2").log.verbosity, 1);
    assert_eq!(run("-v 1 - -v 2").log.verbosity, 1);
}

#[test]
fn numbers_are_gos() {
    for (text, value) in [("7", 7), ("+7", 7), ("-7", -7), ("0x1f", 31), ("017", 15), ("0b11", 3)] {
        assert_eq!(run(&format!("-v {text}")).log.verbosity, value, "{text}");
    }
    assert_eq!(go_syntax::parse_int("1_000"), Ok(1000));
    assert_eq!(go_syntax::parse_int("0x_ff"), Ok(255));
    assert_eq!(go_syntax::parse_int("-0x8000000000000000"), Ok(i64::MIN));
    for text in [
        "",
        "-",
        "+",
        "1.0",
        "7s",
        "_7",
        "7_",
        "1__0",
        "0x",
        "08",
        "--7",
        "9223372036854775808",
        "é",
    ] {
        assert!(go_syntax::parse_int(text).is_err(), "{text}");
    }
}

#[test]
fn mistakes_name_the_flag_and_exit_2() {
    for (line, words) in [
        ("--etcd-endpont=x", &["--etcd-endpont", "--etcd-endpoints"][..]),
        ("-remote x", &["--remote"]),
        ("-etcd-prefix", &["--etcd-prefix", "value"]),
        ("--datapath=fast", &["fast", "auto", "ebpf", "kernel"]),
        ("-v loud", &["loud", "--v", "integer"]),
        ("-healthz-port 65536", &["65536", "--healthz-port", "65535"]),
        ("-healthz-ip nowhere", &["nowhere", "--healthz-ip"]),
        ("-metrics-address 9100", &["9100", "--metrics-address"]),
        ("---v=1", &["---v"]),
        ("-=1", &["-="]),
        ("stauts", &["stauts", "status"]),
    ] {
        let exit = exit(line);
        assert_eq!(exit.code, 2, "{line}");
        for word in words {
            assert!(exit.message.contains(word), "{line}: no {word} in {}", exit.message);
        }
        assert!(
            exit.message.contains("--help") || exit.message.contains("bad flag syntax"),
            "{}",
            exit.message
        );
    }
    let not_text = parse([OsString::from_vec(vec![b'-', 0xff])], NO_ENV).expect_err("not UTF-8");
    assert_eq!(not_text.code, 2);
}

#[test]
fn values_out_of_bounds() {
    for line in ["-subnet-lease-renew-margin 0", "-subnet-lease-renew-margin=1440"] {
        let exit = exit(line);
        assert_eq!(exit.code, 1);
        assert!(exit.message.contains("1 and 1439"), "{}", exit.message);
    }
    assert_eq!(run("-subnet-lease-renew-margin 1439").etcd.renew_margin_minutes, 1439);
    for seconds in ["0", "-3"] {
        let options = run(&format!("-iptables-resync {seconds}"));
        assert_eq!(options.firewall.resync(), Duration::from_secs(1));
        assert!(matches!(&options.notes[..], [Note::Warning(t)] if t.contains(seconds)));
    }
}

#[test]
fn environment_fills_in_what_the_line_leaves() {
    let options = run_with(
        "-etcd-prefix=/line",
        &[
            ("FLANNELD_ETCD_PREFIX", "/env"),
            ("FLANNELD_ETCD_ENDPOINTS", "http://192.0.2.9:2379"),
            ("FLANNELD_IP_MASQ", "T"),
            ("FLANNELD_V", "3"),
            ("FLANNELD_LOG_BACKTRACE_AT", "a.go:1"),
            ("FLANNELD_IFACE", "eth1,eth2"),
            ("FLANNELD_SUBNET_FILE", ""),
            ("FLANNELD_VERSION", "true"),
            ("FLANNELD_DATAPATH", "kernel"),
        ],
    );
    assert_eq!(options.etcd.prefix, "/line");
    assert_eq!(options.etcd.endpoint_list, "http://192.0.2.9:2379");
    assert!(options.firewall.ip_masq);
    assert_eq!(options.log.verbosity, 3);
    assert_eq!(options.log.backtrace_at, "a.go:1");
    assert_eq!(options.interface.iface, ["eth1,eth2"], "one element, not split");
    assert_eq!(options.files.subnet_file.as_os_str(), flags::DEFAULT_SUBNET_FILE);
    assert_eq!(options.datapath.mode, DatapathMode::Kernel);
    assert!(options.notes.is_empty(), "{:?}", options.notes);
}

#[test]
fn a_repeatable_flag_on_the_line_hides_its_variable() {
    let options = run_with("-iface eth0", &[("FLANNELD_IFACE", "eth1")]);
    assert_eq!(options.interface.iface, ["eth0"]);
}

#[test]
fn a_bad_variable_is_noted_and_skipped() {
    let options = run_with("", &[("FLANNELD_V", "loud"), ("FLANNELD_IP_MASQ", "true")]);
    assert_eq!(options.log.verbosity, 0);
    assert!(options.firewall.ip_masq);
    let [Note::Error(text)] = &options.notes[..] else { panic!("{:?}", options.notes) };
    assert!(text.contains("FLANNELD_V") && text.contains("loud"), "{text}");
}

#[test]
fn version_comes_before_the_environment() {
    assert!(matches!(parse_line("-version", NO_ENV), Ok(Command::Version)));
    assert!(matches!(parse_line("--version=false", NO_ENV), Ok(Command::Run(_))));
    let bad = |name: &str| (name == "FLANNELD_V").then(|| "loud".into());
    assert!(matches!(parse_line("-v 1 --version", &bad), Ok(Command::Version)));
    assert!(version_line().contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn secrets_stay_hidden() {
    let options = run_with(
        "-etcd-password s3cret -etcd-endpoints http://u:s3cret@192.0.2.1:2379/,https://b:1 \
         -kube-api-url https://x:s3cret@api",
        &[],
    );
    assert_eq!(options.etcd.password.expose(), "s3cret");
    assert!(!format!("{:?}", options.etcd.password).contains("s3cret"));
    let effective = options.effective.join(" ");
    assert!(!effective.contains("s3cret"), "{effective}");
    assert!(effective.contains("@192.0.2.1:2379/,https://b:1"), "{effective}");
    let options = run_with("", &[("FLANNELD_ETCD_PASSWORD", "s3cret")]);
    assert!(!options.effective.join(" ").contains("s3cret"));
}

#[test]
fn our_flags_take_their_values() {
    let options = run("--datapath ebpf --fast-path=stack --xdp native --peer-filter strict \
                       --local-subnet-mgr /l --metrics-address :9100 --log-format json \
                       --control-socket= -healthz-port 8081 -healthz-ip [::1]");
    assert_eq!(options.datapath.mode, DatapathMode::Ebpf);
    assert_eq!(options.datapath.fast_path, FastPath::Stack);
    assert_eq!(options.datapath.xdp, XdpMode::Native);
    assert_eq!(options.datapath.peer_filter, PeerFilter::Strict);
    assert_eq!(options.files.local_subnet_mgr.0, Some("/l".into()));
    assert_eq!(options.files.control_socket.0, None);
    assert_eq!(options.telemetry.metrics_address, BindAddress("0.0.0.0:9100".parse().ok()));
    assert_eq!(options.telemetry.health_address(), "[::1]:8081".parse().ok());
    assert_eq!(options.log.format, LogFormat::Json);
}

#[test]
fn commands_take_their_flags() {
    let env = |name: &str| (name == "FLANNELD_CONTROL_SOCKET").then(|| "/e.sock".into());
    let Ok(Command::Status(args)) = parse_line("status --output json -subnet-file /s", &env) else {
        panic!("status");
    };
    assert_eq!(args.client.output, Output::Json);
    assert_eq!(args.client.control_socket.as_os_str(), "/e.sock");
    assert_eq!(args.subnet_file.as_os_str(), "/s");
    let Ok(Command::Peers(args)) = parse_line("peers -control-socket=/x", NO_ENV) else {
        panic!("peers");
    };
    assert_eq!(args.client.output, Output::Text);
    assert_eq!(args.client.control_socket.as_os_str(), "/x");
    let Ok(Command::MkDockerOpts(words)) = parse_line("mk-docker-opts -f /x -i", NO_ENV) else {
        panic!("mk-docker-opts");
    };
    assert_eq!(words, ["-f", "/x", "-i"]);
    assert_eq!(exit("status now").code, 2);
    assert_eq!(exit("peers --outptu json").code, 2);
    let help = exit("peers --help");
    assert_eq!(help.code, 0);
    assert!(help.message.contains("--control-socket"), "{}", help.message);
}

#[test]
fn an_empty_target_leaves_a_file_out() {
    let plan = |line: &str| match parse_line(line, NO_ENV) {
        Ok(Command::InstallCni(args)) => args.plan(),
        other => panic!("{line}: {other:?}"),
    };
    let all = plan("install-cni");
    assert_eq!(all.plugin, None);
    assert_eq!(all.bin_dir.as_deref(), Some("/opt/cni/bin".as_ref()));
    assert_eq!(all.conflist.to_str(), Some("/etc/kube-flannel/cni-conf.json"));
    assert_eq!(all.conf_file.as_deref(), Some("/etc/cni/net.d/10-flannel.conflist".as_ref()));
    let some = plan("install-cni --plugin=/flannel --conf-file= --bin-dir=/b");
    assert_eq!(some.plugin.as_deref(), Some("/flannel".as_ref()));
    assert_eq!((some.bin_dir.as_deref(), some.conf_file), (Some("/b".as_ref()), None));
}

#[test]
fn a_program_by_another_name_is_that_command() {
    let of = |program: &str, line: &str| {
        parse_as(program.as_ref(), line.split_whitespace().map(OsString::from), NO_ENV)
    };
    assert!(matches!(of("/opt/bin/flanneld", "--ip-masq"), Ok(Command::Run(_))));
    assert!(matches!(of("/opt/bin/flannel-agent", "status"), Ok(Command::Status(_))));
    match of("/opt/bin/install-conf", "/a /b") {
        Ok(Command::InstallConf(words)) => assert_eq!(words, ["/a", "/b"]),
        other => panic!("{other:?}"),
    }
    match of("mk-docker-opts.sh", "-c") {
        Ok(Command::MkDockerOpts(words)) => assert_eq!(words, ["-c"]),
        other => panic!("{other:?}"),
    }
}
