use std::time::Instant;

use super::*;
use crate::go_json::Object;

fn call(argv: &[&str]) -> Call {
    let json = serde_json::json!({ "C": argv }).to_string();
    let words = Words::parse(&Object::parse(&json).expect("JSON"), "C").expect("usable");
    Call {
        words: words.expect("a command"),
        variables: vec![("SUBNET", "10.5.1.0/24".to_owned())],
        input: "peer's words".to_owned(),
        timeout: Duration::from_secs(20),
    }
}

#[tokio::test]
async fn a_command_gets_variables_and_input_and_its_words_are_kept() {
    let call = call(&["sh", "-c", "echo $0; env | grep ^SUBNET=; cat >&2", "$SUBNET/x"]);
    let text = "$SUBNET/x\nSUBNET=10.5.1.0/24\npeer's words";
    assert_eq!(run(&call).await, Ok(Said { text: text.to_owned(), cut: false }));
}

#[tokio::test]
async fn why_it_failed_is_told_with_its_words() {
    let failed = run(&call(&["sh", "-c", "echo no such thing >&2; exit 3"])).await;
    let reason = failed.expect_err("it failed");
    assert!(reason.contains('3') && reason.contains("no such thing"), "{reason}");
    let reason = run(&call(&["/no/such/program"])).await.expect_err("not there");
    assert!(reason.contains("cannot be started"), "{reason}");
}

#[tokio::test]
async fn what_takes_too_long_is_killed_with_all_it_started() {
    let start = Instant::now();
    let mut call = call(&["sh", "-c", "sleep 987654 & echo $!; wait"]);
    call.timeout = Duration::from_millis(300);
    let reason = run(&call).await.expect_err("too long");
    assert!(reason.contains("killed"), "{reason}");
    assert!(start.elapsed() < Duration::from_secs(10));
    let pid: i32 = reason.rsplit(' ').next().and_then(|pid| pid.parse().ok()).expect("a pid");
    // Its parent is gone, so it is reaped by whoever took it over, or a zombie until then. A signal
    // takes a moment.
    let is_gone = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.is_empty() || stat.contains(") Z") || stat.contains(") X")
    };
    while !is_gone() {
        assert!(start.elapsed() < Duration::from_secs(10), "{pid} lives on");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn neither_a_flood_nor_something_left_behind_nor_unread_input_hangs_it() {
    let mut call = call(&["sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x; sleep 5 & exit 0"]);
    call.input = "y".repeat(1 << 20);
    let start = Instant::now();
    let said = run(&call).await.expect("it worked");
    assert!(said.cut && said.text.len() == KEPT);
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}
