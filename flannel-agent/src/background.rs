//! Long work beside the event loop: a thread of its own, whose outcome the loop waits for.

use std::{io, thread};

use tokio::sync::oneshot;

/// Work on a thread of its own.
///
/// The thread is in the namespaces of the one that starts it. Nobody waits for it when the agent
/// ends, unlike for what [`tokio::task::spawn_blocking`] starts; dropping this forgets the outcome.
pub struct Background<T>(oneshot::Receiver<T>);

impl<T: Send + 'static> Background<T> {
    /// Starts the work. `name` is the thread's, of 15 bytes at most.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (outcome_in, outcome) = oneshot::channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Nobody may be interested any more.
            let _ = outcome_in.send(work());
        })?;
        Ok(Self(outcome))
    }

    /// Resolves, once, with the outcome; `None` if the work panicked. Cancel-safe.
    pub async fn finished(&mut self) -> Option<T> {
        (&mut self.0).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[tokio::test]
    async fn the_loop_goes_on_while_the_work_lasts() {
        let (go, wait) = mpsc::channel();
        let mut work = Background::start("slow", move || wait.recv()).expect("a thread");
        for _ in 0..3 {
            // Polled and dropped, as by a loop that has other things to do.
            let pause = Duration::from_millis(5);
            assert!(tokio::time::timeout(pause, work.finished()).await.is_err());
        }
        go.send(7).expect("it waits");
        assert_eq!(work.finished().await, Some(Ok(7)));
    }

    #[tokio::test]
    async fn work_that_panics_has_no_outcome() {
        let mut work = Background::start("broken", || -> u8 { panic!("on purpose") });
        assert_eq!(work.as_mut().expect("a thread").finished().await, None);
    }

    #[test]
    fn the_end_of_the_agent_waits_for_nothing() {
        let (_go, wait) = mpsc::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let work = runtime.block_on(async { Background::start("slow", move || wait.recv()) });
        // This would wait for ever if anything did.
        drop((work, runtime));
    }
}
