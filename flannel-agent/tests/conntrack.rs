//! What the kernel's connection tracking tells, and takes, about single connections.
//!
//! Needs root: `cargo xtask test lab`.

use std::{
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use flannel_agent::netlink::conntrack::{Connection, Conntrack, Tracked};
use nix::sched::{CloneFlags, unshare};

/// Runs a story in a network namespace in which connections of both families are tracked.
fn tracked(story: impl FnOnce(Conntrack) + Send + 'static) {
    let run = move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace: be root");
        run("ip link set lo up");
        run("iptables -A INPUT -m conntrack --ctstate INVALID -j DROP");
        run("ip6tables -A INPUT -m conntrack --ctstate INVALID -j DROP");
        story(Conntrack::open().expect("a socket"));
    };
    if let Err(panic) = thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

fn run(line: &str) {
    let mut words = line.split(' ');
    let program = words.next().expect("a program");
    let output = Command::new(program).args(words).output().expect(program);
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

fn connect(address: &str) -> (TcpStream, TcpStream, Connection) {
    let listener = TcpListener::bind(address).expect("bound");
    let ours = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
    let (theirs, _) = listener.accept().expect("accepted");
    let (from, to) = (ours.local_addr().expect("ours"), ours.peer_addr().expect("theirs"));
    (ours, theirs, Connection { from, to, tcp: true })
}

fn reversed(connection: Connection) -> Connection {
    Connection { from: connection.to, to: connection.from, ..connection }
}

fn find(conntrack: &mut Conntrack, connection: &Connection) -> Tracked {
    conntrack.find(connection).expect("an answer").expect("tracked")
}

#[test]
#[ignore = "needs root"]
fn an_open_connection_is_settled_and_takes_the_liberal_flag_from_either_end() {
    tracked(|mut conntrack| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (_ours, _theirs, connection) = connect(address);
            for connection in [connection, reversed(connection)] {
                let found = find(&mut conntrack, &connection);
                assert!(found.is_settled() && !found.liberal, "{found:?}");
            }
            conntrack.be_liberal(&reversed(connection)).expect("set");
            for connection in [connection, reversed(connection)] {
                let found = find(&mut conntrack, &connection);
                assert!(found.is_settled() && found.liberal, "{found:?}");
            }
        }
    });
}

#[test]
#[ignore = "needs root"]
fn a_connection_that_ends_is_not_open() {
    tracked(|mut conntrack| {
        let (ours, _theirs, connection) = connect("127.0.0.1:0");
        drop(ours);
        let start = Instant::now();
        while find(&mut conntrack, &connection).open {
            assert!(start.elapsed() < Duration::from_secs(5), "still open");
            thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
#[ignore = "needs root"]
fn a_translated_connection_is_altered() {
    tracked(|mut conntrack| {
        run("iptables -t nat -A OUTPUT -p tcp -d 127.0.0.9 --dport 80 -j DNAT --to 127.0.0.1:8080");
        let _listener = TcpListener::bind("127.0.0.1:8080").expect("bound");
        let service: SocketAddr = "127.0.0.9:80".parse().expect("an address");
        let stream = TcpStream::connect(service).expect("connected");
        let from = stream.local_addr().expect("ours");
        let found = find(&mut conntrack, &Connection { from, to: service, tcp: true });
        assert!(found.altered && !found.is_settled(), "{found:?}");
        // By the tuple after the translation: only in the direction of the reply.
        let backend = "127.0.0.1:8080".parse().expect("an address");
        let reply = Connection { from: backend, to: from, tcp: true };
        assert!(find(&mut conntrack, &reply).altered);
        let sent = conntrack.find(&reversed(reply)).expect("an answer");
        assert_eq!(sent, None);
    });
}

#[test]
#[ignore = "needs root"]
fn unknown_connections_are_none_and_no_error() {
    tracked(|mut conntrack| {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        for (from, to) in [("10.0.0.1:1", "10.0.0.2:2"), ("[fd00::1]:1", "[fd00::2]:2")] {
            for tcp in [true, false] {
                let connection = Connection { from: address(from), to: address(to), tcp };
                assert_eq!(conntrack.find(&connection).expect("an answer"), None);
                assert!(conntrack.be_liberal(&connection).is_err());
            }
        }
    });
}

#[test]
#[ignore = "needs root"]
fn a_udp_exchange_is_settled_once_it_is_answered() {
    tracked(|mut conntrack| {
        let one = UdpSocket::bind("127.0.0.1:0").expect("bound");
        let other = UdpSocket::bind("127.0.0.1:0").expect("bound");
        let (from, to) = (one.local_addr().expect("one"), other.local_addr().expect("other"));
        one.send_to(b"question", to).expect("sent");
        let found = find(&mut conntrack, &Connection { from, to, tcp: false });
        assert!(!found.is_settled(), "{found:?}");
        other.send_to(b"answer", from).expect("sent");
        let found = find(&mut conntrack, &Connection { from, to, tcp: false });
        assert!(found.liberal && found.is_settled(), "{found:?}");
    });
}
