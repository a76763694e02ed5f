//! The verifier may take long over the eBPF programs. Meanwhile the agent works, without them.
//!
//! No machine is slow on demand, so the one thread that loads them is stopped by ptrace(2).

use std::{fs, time::Instant};

use flannel_lab::{
    agent::{LOADING, subcommand},
    prelude::*,
    vxlan_view::VxlanView,
};
use nix::{
    errno::Errno,
    sys::{
        ptrace,
        signal::Signal,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// The name of the thread.
const LOADER: &str = "ebpf-load";

/// A thread that stands still until this is dropped.
struct Stopped(Pid);

impl Stopped {
    /// Waits for a process to start the thread, and stops it.
    fn catch(process: u32) -> Result<Self> {
        let begun = Instant::now();
        loop {
            if let Some(thread) = thread_called(process, LOADER) {
                ptrace::seize(thread, ptrace::Options::empty())?;
                ptrace::interrupt(thread)?;
                waitpid(thread, Some(WaitPidFlag::__WALL))?;
                return Ok(Self(thread));
            }
            ensure!(begun.elapsed() < READY_WITHIN, "no thread {LOADER}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Stopped {
    /// Waits for its end, with its process: a thread that is traced is its tracer's to bury.
    fn ends_within(self, time: Duration) -> Result<()> {
        eventually("the thread has ended", time, || {
            let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
            let ended = matches!(
                waitpid(self.0, Some(flags)),
                Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(Errno::ECHILD)
            );
            Ok(ended.then_some(()))
        })
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        match ptrace::detach(self.0, None) {
            // It is gone with its process.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(err) => eprintln!("thread {} stays stopped: {err}", self.0),
        }
    }
}

fn thread_called(process: u32, name: &str) -> Option<Pid> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).ok()?;
    threads.flatten().find_map(|thread| {
        let called = fs::read_to_string(thread.path().join("comm")).ok()?;
        let number = thread.file_name().to_str()?.parse().ok()?;
        (called.trim() == name).then(|| Pid::from_raw(number))
    })
}

fn reason(agent: &Agent) -> Result<Value> {
    Ok(agent.status()?["backend"]["datapath"]["reason"].clone())
}

fn routed(node: &Node, subnet: &str) -> Result<bool> {
    let view = VxlanView::read(node.ns(), "flannel.1")?;
    Ok(view.routes.iter().any(|(destination, _)| destination == subnet))
}

#[test]
fn the_agent_works_while_the_programs_are_loaded() -> Result<()> {
    const SOON: Duration = Duration::from_secs(3);
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    let node = lab.node("alder")?;
    let birch = KernelPeer::new(lab.node("birch")?, PeerSpec::v4(200))?;
    let (key, lease) = birch.lease();
    let mut flags = store.flags();
    flags.push("--datapath=ebpf".to_owned());

    let mut agent = node.agent(&flags)?;
    let stopped = Stopped::catch(agent.pid())?;
    let env = agent.wait_first_ready(READY_WITHIN)?;
    birch.learn(&env.key()?, &store.leases()?[&env.key()?])?;
    ensure!(reason(&agent)? == LOADING, "{}", reason(&agent)?);
    // What changes is seen to.
    store.put_lease(&key, &lease)?;
    eventually("birch is a peer", SOON, || Ok(routed(&node, "10.77.200.0/24")?.then_some(())))?;
    let ours = node.pod(&env)?;
    let theirs = birch.node().pod(&birch.env()?)?;
    traffic::wait_reaches(ours.ns(), theirs.v4()?, SOON)?;
    let output = subcommand(&node, &["status"])?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(reason(&agent)? == LOADING, "{}", reason(&agent)?);

    drop(stopped);
    eventually("the programs know birch", READY_WITHIN, || {
        let datapath = agent.status()?["backend"]["datapath"].take();
        Ok((datapath["mode"] == "ebpf" && datapath["programs"]["peers"] == 1).then_some(()))
    })?;
    traffic::wait_reaches(ours.ns(), theirs.v4()?, SOON)?;
    Ok(())
}

#[test]
fn a_stop_while_the_programs_are_loaded_leaves_nothing_half_done() -> Result<()> {
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    let node = lab.node("alder")?;
    let mut flags = store.flags();
    flags.push("--datapath=ebpf".to_owned());

    let mut agent = node.agent(&flags)?;
    let stopped = Stopped::catch(agent.pid())?;
    agent.wait_first_ready(READY_WITHIN)?;
    agent.process().signal(Signal::SIGTERM)?;
    stopped.ends_within(Duration::from_secs(3))?;
    let status = agent.process().wait(Duration::from_secs(3))?;
    ensure!(status.code() == Some(0), "{status}\n{}", agent.log());
    let pins = fs::read_dir(node.path("/sys/fs/bpf/flannel/flannel:1"))?;
    let links: Vec<_> = pins.flatten().filter(|pin| pin.path().is_file()).collect();
    ensure!(links.is_empty(), "attached: {links:?}");

    let mut agent = node.agent(&flags)?;
    agent.wait_ready(READY_WITHIN)?;
    ensure!(agent.status()?["backend"]["datapath"]["mode"] == "ebpf", "{}", agent.log());
    ensure!(agent.complaints(&[]).is_empty(), "{:?}", agent.complaints(&[]));
    Ok(())
}

#[test]
fn an_earlier_agents_programs_stand_aside_when_what_they_know_is_old() -> Result<()> {
    const SOON: Duration = Duration::from_secs(3);
    let lab = Lab::new()?;
    let store = LocalStore::new(&lab)?;
    store.put_config(r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#)?;
    let node = lab.node("alder")?;
    let birch = KernelPeer::new(lab.node("birch")?, PeerSpec::v4(200))?;
    let (key, lease) = birch.lease();
    let mut flags = store.flags();
    flags.push("--datapath=ebpf".to_owned());
    // These programs do not know birch, and drop what strangers send.
    let mut agent = node.agent(&flags)?;
    let env = agent.wait_ready(READY_WITHIN)?;
    birch.learn(&env.key()?, &store.leases()?[&env.key()?])?;
    agent.stop()?;
    store.put_lease(&key, &lease)?;

    let mut agent = node.agent(&flags)?;
    let _stopped = Stopped::catch(agent.pid())?;
    agent.wait_first_ready(READY_WITHIN)?;
    eventually("birch is a peer", SOON, || Ok(routed(&node, "10.77.200.0/24")?.then_some(())))?;
    let (ours, theirs) = (node.pod(&env)?, birch.node().pod(&birch.env()?)?);
    traffic::wait_reaches(theirs.ns(), ours.v4()?, SOON)?;
    traffic::wait_reaches(ours.ns(), theirs.v4()?, SOON)?;
    ensure!(reason(&agent)? == LOADING, "{}", reason(&agent)?);
    Ok(())
}
