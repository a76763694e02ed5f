//! The program stays attached, once, whatever happens around it.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{
        SchedClassifier, TcAttachType,
        links::{FdLink, PinnedLink},
    },
};
use flannel_agent::datapath::ebpf::{EbpfDatapath, EbpfError, EbpfOptions};
use flannel_common::map::SCHEMA_VERSION;

use super::{
    V4_PEER, load, load_clsact, load_error,
    namespace::{
        filters, ifindex, in_namespace, ip, mount_bpffs, object, run, tcx, test_run, unmount,
    },
    options,
    packet::Shape,
    wanted,
};

fn ids(device: &str) -> Vec<u32> {
    tcx(device).iter().map(aya::programs::ProgramInfo::id).collect()
}

/// The only program at `v1` sees a packet of the IPv4 peer.
fn send_one() {
    let programs = tcx("v1");
    assert_eq!(programs.len(), 1);
    test_run(&programs[0], &Shape::from(V4_PEER).packet());
}

fn packets(datapath: &EbpfDatapath) -> u64 {
    datapath.peer_counters().expect("read").iter().map(|row| row.packets).sum()
}

fn pins(pin_dir: &Path) -> std::path::PathBuf {
    pin_dir.join("flannel:66051")
}

fn link_id(pin_dir: &Path) -> u32 {
    let path = pins(pin_dir).join(format!("underlay_ingress-{}", ifindex("v1")));
    let link = PinnedLink::from_pin(path).expect("a pinned link");
    FdLink::from(link).info().expect("info").id()
}

/// Attaches the same program as somebody else would.
fn foreign_program() -> Ebpf {
    let mut ebpf = EbpfLoader::new().load_file(object()).expect("loaded");
    let program: &mut SchedClassifier =
        ebpf.program_mut("underlay_ingress").expect("there").try_into().expect("a classifier");
    program.load().expect("loaded");
    program.attach("v1", TcAttachType::Ingress).expect("attached");
    ebpf
}

/// Attaches the same program as somebody else would, as a filter with another name.
fn foreign_filter(pin_dir: &Path, place: &str) {
    let mut ebpf = EbpfLoader::new().load_file(object()).expect("loaded");
    let program = ebpf.program_mut("underlay_ingress").expect("there");
    let program: &mut SchedClassifier = program.try_into().expect("a classifier");
    program.load().expect("loaded");
    let path = pin_dir.join("foreign");
    program.pin(&path).expect("pinned");
    run("tc", "qdisc add dev v1 clsact");
    run("tc", &format!("filter add dev v1 ingress {place} bpf da pinned {}", path.display()));
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn what_another_version_left_goes_once_ours_is_attached() {
    in_namespace(|pin_dir| {
        let old_maps = pins(pin_dir).join("v0");
        std::fs::create_dir_all(&old_maps).expect("a directory");
        let mut ebpf = EbpfLoader::new().load_file(object()).expect("loaded");
        ebpf.map("OUTCOMES").expect("there").pin(old_maps.join("OLD_COUNTERS")).expect("pinned");
        let program: &mut SchedClassifier =
            ebpf.program_mut("underlay_ingress").expect("there").try_into().expect("a classifier");
        program.load().expect("loaded");
        let link = program.attach("v1", TcAttachType::Ingress).expect("attached");
        let link = FdLink::try_from(program.take_link(link).expect("ours")).expect("TCX");
        let old_link = pins(pin_dir).join(format!("old_ingress-{}", ifindex("v1")));
        drop(link.pin(&old_link).expect("pinned"));
        drop(ebpf);
        let old = ids("v1");
        assert_eq!(old.len(), 1);

        let mut ours = load(pin_dir);
        assert!(old_maps.exists() && old_link.exists(), "removed before ours is there");
        ours.apply(&wanted(&[ifindex("v1")])).expect("applied");
        assert!(!old_maps.exists(), "old maps are left");
        assert!(!old_link.exists(), "an old link is left");
        let new = ids("v1");
        assert_eq!(new.len(), 1);
        assert_ne!(new, old);
        send_one();
        assert_eq!(packets(&ours), 1);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_restart_replaces_the_program_and_keeps_the_counters() {
    in_namespace(|pin_dir| {
        let wanted = wanted(&[ifindex("v1")]);
        let mut first = load(pin_dir);
        first.apply(&wanted).expect("applied");
        send_one();
        let (link, program) = (link_id(pin_dir), ids("v1"));
        assert!(matches!(load_error(options(pin_dir)), EbpfError::InUse(_)), "one at a time");
        drop(first);
        assert_eq!(ids("v1"), program, "it stays without the agent");
        send_one();

        let mut second = load(pin_dir);
        assert_eq!(ids("v1"), program, "loading alone changes nothing");
        assert_eq!(second.apply(&wanted).expect("applied"), 1, "the program, and no peer");
        assert_eq!(ids("v1").len(), 1);
        assert_ne!(ids("v1"), program);
        assert_eq!(link_id(pin_dir), link, "the same link holds it");
        assert_eq!(packets(&second), 2);
        send_one();
        assert_eq!(packets(&second), 3);
        assert_eq!(second.status()["hook"], "tcx");
        assert_eq!(second.apply(&wanted).expect("applied"), 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn programs_of_others_are_left_alone() {
    in_namespace(|pin_dir| {
        let v1 = ifindex("v1");
        let before = foreign_program();
        let foreign = ids("v1");
        let mut datapath = load(pin_dir);
        datapath.apply(&wanted(&[v1])).expect("applied");
        let after = foreign_program();
        let all = ids("v1");
        assert_eq!((all.len(), all[0]), (3, foreign[0]));
        drop(datapath);
        let mut datapath = load(pin_dir);
        datapath.apply(&wanted(&[v1])).expect("applied");
        let replaced = ids("v1");
        assert_eq!((replaced[0], replaced[2], replaced.len()), (all[0], all[2], 3));
        assert_ne!(replaced[1], all[1], "ours is replaced in its place");
        assert_eq!(datapath.apply(&wanted(&[])).expect("applied"), 1);
        assert_eq!(ids("v1"), [all[0], all[2]]);
        drop((before, after));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn what_was_detached_by_hand_comes_back() {
    in_namespace(|pin_dir| {
        let wanted = wanted(&[ifindex("v1")]);
        let mut datapath = load(pin_dir);
        datapath.apply(&wanted).expect("applied");
        run("bpftool", &format!("link detach id {}", link_id(pin_dir)));
        assert!(ids("v1").is_empty());
        assert_eq!(datapath.apply(&wanted).expect("applied"), 1);
        send_one();
        assert_eq!(packets(&datapath), 1);

        // The same while the agent is away.
        drop(datapath);
        run("bpftool", &format!("link detach id {}", link_id(pin_dir)));
        let mut datapath = load(pin_dir);
        assert_eq!(datapath.apply(&wanted).expect("applied"), 1);
        send_one();
        assert_eq!(packets(&datapath), 2);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_bpf_file_system_mounted_anew_gets_the_pins_again() {
    in_namespace(|pin_dir| {
        let wanted = wanted(&[ifindex("v1")]);
        let mut datapath = load(pin_dir);
        datapath.apply(&wanted).expect("applied");
        send_one();
        unmount(pin_dir);
        assert_eq!(ids("v1").len(), 1, "the agent holds it");
        assert_eq!(datapath.apply(&wanted).expect("applied"), 0, "all works on without pins");
        let problem = datapath.status()["problem"].to_string();
        assert!(problem.contains("mount -t bpf bpf /sys/fs/bpf"), "{problem}");
        mount_bpffs(pin_dir);
        assert_eq!(datapath.apply(&wanted).expect("applied"), 1, "the link's pin");
        assert!(datapath.status()["problem"].is_null());
        send_one();
        drop(datapath);

        let mut datapath = load(pin_dir);
        datapath.apply(&wanted).expect("applied");
        send_one();
        assert_eq!(packets(&datapath), 3);
        // Away together with the agent: a new beginning, and still once only.
        drop(datapath);
        unmount(pin_dir);
        // The kernel frees what was pinned there in its own time.
        let deadline = Instant::now() + Duration::from_secs(5);
        while !ids("v1").is_empty() {
            assert!(Instant::now() < deadline, "something of ours stays behind");
            thread::sleep(Duration::from_millis(5));
        }
        mount_bpffs(pin_dir);
        let mut datapath = load(pin_dir);
        datapath.apply(&wanted).expect("applied");
        send_one();
        assert_eq!(packets(&datapath), 1);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_device_made_anew_is_attached_to_and_the_old_one_forgotten() {
    in_namespace(|pin_dir| {
        let mut datapath = load(pin_dir);
        datapath.apply(&wanted(&[ifindex("v1")])).expect("applied");
        let old = ifindex("v1");
        ip("link del v0");
        ip("link add v0 type veth peer name v1");
        let gone = datapath.apply(&wanted(&[old])).expect_err("no such device");
        assert!(gone.to_string().contains(&format!("interface {old}")), "{gone}");
        assert_ne!(ifindex("v1"), old);
        datapath.apply(&wanted(&[ifindex("v1")])).expect("applied");
        send_one();
        assert_eq!(packets(&datapath), 1);

        // And while the agent is away.
        drop(datapath);
        ip("link del v0");
        ip("link add v0 type veth peer name v1");
        let mut datapath = load(pin_dir);
        datapath.apply(&wanted(&[ifindex("v1")])).expect("applied");
        send_one();
        let links = std::fs::read_dir(pins(pin_dir)).expect("read").flatten();
        let links = links.filter(|entry| entry.path().is_file()).count();
        assert_eq!(links, 1, "the old link's pin is gone");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn clsact_does_the_same() {
    in_namespace(|pin_dir| {
        let wanted = wanted(&[ifindex("v1")]);
        foreign_filter(pin_dir, "pref 7 handle 5");
        let others = filters("v1");
        let ours = |what: &str| {
            let lines: Vec<_> =
                filters("v1").into_iter().filter(|line| !others.contains(line)).collect();
            assert_eq!(lines.len(), 1, "{what}: {lines:?}");
            assert!(lines[0].contains("pref 17996 bpf chain 0 handle 0x1"), "{lines:?}");
            lines[0].clone()
        };
        let mut datapath = load_clsact(pin_dir);
        assert_eq!(datapath.apply(&wanted).expect("applied"), 4);
        assert_eq!(datapath.status()["hook"], "clsact");
        let first = ours("attached");
        assert_eq!(datapath.apply(&wanted).expect("applied"), 0);
        drop(datapath);
        assert_eq!(ours("without the agent"), first);
        let mut datapath = load_clsact(pin_dir);
        assert_eq!(datapath.apply(&wanted).expect("applied"), 1);
        assert_ne!(ours("restarted"), first);

        run("tc", "filter del dev v1 ingress pref 17996");
        assert_eq!(datapath.apply(&wanted).expect("applied"), 1);
        ours("deleted by hand");
        drop(datapath);

        let mut datapath = load(pin_dir);
        datapath.apply(&wanted).expect("applied");
        assert_eq!((ids("v1").len(), filters("v1")), (1, others.clone()), "by TCX alone");
        drop(datapath);
        let mut datapath = load_clsact(pin_dir);
        datapath.apply(&wanted).expect("applied");
        assert!(ids("v1").is_empty(), "by clsact alone");
        ours("clsact again");
        datapath.apply(&super::wanted(&[])).expect("applied");
        assert_eq!(filters("v1"), others);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn programs_that_meet_at_a_device_share_its_side_by_clsact() {
    in_namespace(|pin_dir| {
        let mut wanted = wanted(&[ifindex("v1")]);
        wanted.pod_devices = [ifindex("v1")].into_iter().collect();
        let mut datapath = load_clsact(pin_dir);
        datapath.apply(&wanted).expect("applied");
        let names = || {
            let lines = filters("v1");
            ["underlay_ingress", "pod_guard"]
                .map(|name| lines.iter().filter(|line| line.contains(name)).count())
        };
        assert_eq!(names(), [1, 1], "{:?}", filters("v1"));
        assert_eq!(datapath.apply(&wanted).expect("applied"), 0);
        wanted.pod_devices.clear();
        datapath.apply(&wanted).expect("applied");
        assert_eq!(names(), [1, 0], "{:?}", filters("v1"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn a_taken_place_is_not_overwritten() {
    in_namespace(|pin_dir| {
        foreign_filter(pin_dir, "pref 17996 handle 1");
        let others = filters("v1");
        let error = load_clsact(pin_dir).apply(&wanted(&[ifindex("v1")])).expect_err("taken");
        assert!(error.to_string().contains("17996"), "{error}");
        assert_eq!(filters("v1"), others);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn maps_of_another_shape_are_replaced_and_nonsense_in_ours_is_dropped() {
    in_namespace(|pin_dir| {
        let wanted = wanted(&[ifindex("v1")]);
        drop(load(pin_dir));
        let maps = pins(pin_dir).join(format!("v{SCHEMA_VERSION}"));
        let path = maps.join("OUTCOMES");
        std::fs::remove_file(&path).expect("removed");
        let kind = "type array key 4 value 16 entries 6 name OUTCOMES";
        run("bpftool", &format!("map create {} {kind}", path.display()));
        // Two peers with one place: at most one can be right.
        let peers = maps.join("PEERS");
        for last in [1, 2] {
            let key = format!("1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 {last}");
            let value = vec!["0"; 28].join(" ");
            let arguments =
                format!("map update pinned {} key {key} value {value}", peers.display());
            run("bpftool", &arguments);
        }
        let mut datapath = load(pin_dir);
        assert_eq!(datapath.status()["peers"], 1);
        datapath.apply(&wanted).expect("applied");
        send_one();
        assert_eq!(datapath.status()["outcomes"]["from-peer"]["packets"], 1);
        assert_eq!(datapath.status()["peers"], 2);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn refusals_name_the_reason() {
    in_namespace(|pin_dir| {
        let elsewhere = tempfile::tempdir().expect("a directory");
        let error = load_error(options(&elsewhere.path().join("deep/down"))).to_string();
        assert!(error.contains("mount -t bpf bpf /sys/fs/bpf"), "{error}");
        let error = load_error(EbpfOptions { device: "a/b".to_owned(), ..options(pin_dir) });
        assert!(matches!(error, EbpfError::DeviceName(_)), "{error}");
        ip("tuntap add mode tun name t0");
        let error = load(pin_dir).apply(&wanted(&[ifindex("t0")])).expect_err("no Ethernet");
        assert!(error.to_string().contains("t0 is no Ethernet device"), "{error}");
        keep_capabilities(&[]);
        let error = load_error(options(pin_dir)).to_string();
        assert!(error.contains("CAP_BPF and CAP_NET_ADMIN and CAP_PERFMON"), "{error}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn the_capabilities_that_are_asked_for_suffice() {
    const CAP_NET_ADMIN: u32 = 12;
    const CAP_PERFMON: u32 = 38;
    const CAP_BPF: u32 = 39;
    in_namespace(|pin_dir| {
        let path = pin_dir.to_owned();
        let runtime = tokio::runtime::Handle::current();
        let agent = move || {
            let _entered = runtime.enter();
            keep_capabilities(&[CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF]);
            let underlay = wanted(&[ifindex("v1")]);
            let mut first = load(&path);
            first.apply(&underlay).expect("applied");
            let link = link_id(&path);
            assert_eq!(first.apply(&underlay).expect("applied"), 0, "it stands");
            drop(first);
            let mut second = load(&path);
            assert_eq!(second.apply(&underlay).expect("applied"), 1, "the program is replaced");
            assert_eq!(second.apply(&underlay).expect("applied"), 0, "it stands");
            assert_eq!(link_id(&path), link);
        };
        thread::spawn(agent).join().expect("an agent without CAP_SYS_ADMIN");
        assert_eq!(ids("v1").len(), 1);
    });
}

/// Leaves this thread with these capabilities at most.
fn keep_capabilities(kept: &[u32]) {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    let word = |first: u32| {
        let bits = kept.iter().filter(|bit| (first..first + 32).contains(*bit));
        bits.fold(0, |word, bit| word | 1_u32 << (bit - first))
    };
    // Effective, permitted, inheritable; the lower halves, then the upper ones.
    let sets = [word(0), word(0), 0, word(32), word(32), 0];
    // SAFETY: the kernel reads a header of two words and six words of capability sets.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    assert_eq!(result, 0, "capset: {}", std::io::Error::last_os_error());
}
