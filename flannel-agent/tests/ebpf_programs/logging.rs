//! What the programs log arrives at the `log` crate, and real traffic is counted.

use std::{
    io,
    os::fd::AsRawFd,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use flannel_agent::datapath::ebpf::{EbpfDatapath, EbpfOptions};
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, SockaddrLike, sendto, socket,
};

use super::{
    V4_PEER,
    namespace::{ifindex, in_namespace},
    options,
    packet::Shape,
    wanted,
};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Collector;

impl log::Log for Collector {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {} {}", record.level(), record.target(), record.args());
        LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn flush(&self) {}
}

fn lines() -> Vec<String> {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines.iter().filter(|line| line.contains("tunnel packet")).cloned().collect()
}

/// Puts a frame for `v1` on the cable at `v0`.
fn send(mut frame: Vec<u8>) -> io::Result<()> {
    let mac = nix::ifaddrs::getifaddrs()?
        .filter(|interface| interface.interface_name == "v1")
        .find_map(|interface| interface.address?.as_link_addr()?.addr())
        .ok_or(io::ErrorKind::NotFound)?;
    frame[..6].copy_from_slice(&mac);
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), None)?;
    // SAFETY: all zeros are a valid address.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or_default();
    address.sll_ifindex = ifindex("v0").cast_signed();
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).ok();
    // SAFETY: the pointer is to an address of this length.
    let address = unsafe { LinkAddr::from_raw((&raw const address).cast(), length) };
    let address = address.ok_or(io::ErrorKind::InvalidInput)?;
    sendto(socket.as_raw_fd(), &frame, &address, MsgFlags::empty())?;
    Ok(())
}

#[test]
#[ignore = "needs root: cargo xtask test"]
fn unknown_senders_are_logged_once_a_second_and_only_if_asked() {
    log::set_logger(&Collector).expect("the first logger");
    log::set_max_level(log::LevelFilter::Info);
    in_namespace(|pin_dir| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        runtime.block_on(async {
            let wanted = wanted(&[ifindex("v1")]);
            let stranger = || Shape::from("198.51.100.9").packet();
            let mut quiet = EbpfDatapath::load(options(pin_dir)).expect("loaded");
            quiet.apply(&wanted).expect("applied");
            send(stranger()).expect("sent");
            drop(quiet);

            let talkative = EbpfOptions { log: true, ..options(pin_dir) };
            let mut datapath = EbpfDatapath::load(talkative).expect("loaded");
            datapath.apply(&wanted).expect("applied");
            for _ in 0..20 {
                send(stranger()).expect("sent");
                send(Shape::from(V4_PEER).packet()).expect("sent");
            }
            let deadline = Instant::now() + Duration::from_secs(5);
            while lines().is_empty() && Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let expected =
                "INFO flannel_ebpf::underlay_ingress tunnel packet from 198.51.100.9, which is no peer";
            assert_eq!(lines(), [expected]);
            let status = datapath.status();
            assert_eq!(status["outcomes"]["unknown-source"]["packets"], 21);
            assert_eq!(status["outcomes"]["from-peer"]["packets"], 20);
        });
    });
}
