//! Notices changes in the local store's directory by inotify.

use std::{ffi::OsString, future::pending, io, time::Duration};

use futures_util::{FutureExt, StreamExt};
use inotify::{Event, EventMask, EventStream, Inotify, WatchDescriptor, WatchMask};
use tracing::warn;

use super::directory::{Directory, Dirty};

/// How often to look where the kernel does not tell about changes.
const POLL: Duration = Duration::from_secs(1);

/// Watches the directory and its `subnets`.
#[derive(Default)]
pub(super) struct Watch {
    active: Option<Active>,
    polling: bool,
}

struct Active {
    events: EventStream<Vec<u8>>,
    subnets: WatchDescriptor,
}

impl Active {
    fn new(dir: &Directory) -> io::Result<Self> {
        let gone = WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR;
        let inotify = Inotify::init()?;
        let mut watches = inotify.watches();
        watches.add(dir.root(), gone | WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE)?;
        // Not CREATE: a file just made is empty; its writer's close will be heard.
        let subnets = watches.add(
            dir.subnets(),
            gone | WatchMask::CLOSE_WRITE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ATTRIB,
        )?;
        Ok(Self { events: inotify.into_event_stream(vec![0; 4096])?, subnets })
    }

    /// Files that an event is about; `None` if the watch itself is of no more use.
    fn names(&self, event: io::Result<Event<OsString>>) -> Option<Option<OsString>> {
        let event = event.ok()?;
        let lost = EventMask::Q_OVERFLOW
            | EventMask::IGNORED
            | EventMask::DELETE_SELF
            | EventMask::MOVE_SELF
            | EventMask::UNMOUNT;
        if event.mask.intersects(lost) {
            return None;
        }
        if event.wd == self.subnets {
            return Some(event.name);
        }
        // In the directory itself only the coming and going of `subnets` matters.
        event.name.is_none_or(|name| name != "subnets").then_some(None)
    }
}

impl Watch {
    /// Starts watching unless it does. Says what to read: everything after a new start. Fails
    /// only if the directory is not there.
    pub fn establish(&mut self, dir: &Directory) -> io::Result<Option<Dirty>> {
        if self.active.is_some() {
            return Ok(None);
        }
        dir.ensure_subnets()?;
        match Active::new(dir) {
            Ok(active) => {
                self.active = Some(active);
                self.polling = false;
            }
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                return Err(e);
            }
            Err(e) => {
                if !self.polling {
                    warn!(
                        "cannot watch {}: {e}; looking once a second instead \
                         (sysctl fs.inotify.max_user_instances and max_user_watches set the limits)",
                        dir.root().display()
                    );
                }
                self.polling = true;
            }
        }
        Ok(Some(Dirty::All))
    }

    /// Resolves when something may have changed.
    pub async fn changed(&mut self) -> Dirty {
        let Some(active) = &mut self.active else {
            if self.polling {
                tokio::time::sleep(POLL).await;
                return Dirty::All;
            }
            return pending().await;
        };
        let mut names = Vec::new();
        let mut next = active.events.next().await;
        // Whatever else has queued up is done in one go.
        while let Some(event) = next {
            match active.names(event) {
                Some(name) => names.extend(name),
                None => {
                    self.active = None;
                    return Dirty::All;
                }
            }
            next = match active.events.next().now_or_never() {
                Some(event) => event,
                None => {
                    names.sort_unstable();
                    names.dedup();
                    return Dirty::Names(names);
                }
            };
        }
        self.active = None;
        Dirty::All
    }
}
