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

enum Meaning {
    /// This lease file has to be read again.
    File(OsString),
    /// Nothing to do.
    Nothing,
    /// Events were lost or the watch has ended: watch anew and read everything.
    WatchOver,
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

    /// What an event means.
    fn read(&self, event: io::Result<Event<OsString>>) -> Meaning {
        let Ok(event) = event else { return Meaning::WatchOver };
        let lost = EventMask::Q_OVERFLOW
            | EventMask::IGNORED
            | EventMask::DELETE_SELF
            | EventMask::MOVE_SELF
            | EventMask::UNMOUNT;
        if event.mask.intersects(lost) {
            return Meaning::WatchOver;
        }
        match event.name {
            Some(name) if event.wd == self.subnets => Meaning::File(name),
            // In the directory itself only the coming and going of `subnets` matters.
            Some(name) if name == "subnets" => Meaning::WatchOver,
            _ => Meaning::Nothing,
        }
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
        let mut next = Some(active.events.next().await);
        // Whatever else has queued up is done in one go.
        while let Some(event) = next {
            match event.map_or(Meaning::WatchOver, |event| active.read(event)) {
                Meaning::File(name) => names.push(name),
                Meaning::Nothing => {}
                Meaning::WatchOver => {
                    self.active = None;
                    return Dirty::All;
                }
            }
            next = active.events.next().now_or_never();
        }
        names.sort_unstable();
        names.dedup();
        Dirty::Names(names)
    }
}
