//! Loads policies by replacing a file in a watched folder.

use super::trust::beside;
use super::{Error, PolicyHost, SlotKind, Source};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

const PERIOD: Duration = Duration::from_millis(250);

/// Size and time of a component, and of its signatures if it has any: this tells a new one from the one already seen, and
/// one that was signed later is looked at again.
type Stamp = Option<((u64, SystemTime), Option<(u64, SystemTime)>)>;

/// Starts the thread; it ends with the host.
pub(super) fn start(host: &Arc<PolicyHost>, folder: PathBuf) -> Result<(), Error> {
    std::fs::create_dir_all(&folder).map_err(|source| Error::Read { path: folder.clone(), source })?;
    // Files present at the first start are loaded too: the folder says what should serve. Later, what was
    // loaded last has been restored, and may be newer than the file.
    let seen = |slot| host.was_restored(slot).then(|| stamp(&path(&folder, slot))).flatten();
    let loaded = SlotKind::ALL.map(seen);
    let host = Arc::downgrade(host);
    let thread = std::thread::Builder::new().name("kvasir-watch".into());
    let watch = move || watch(&host, &folder, loaded);
    thread.spawn(watch).map(drop).map_err(|e| Error::Engine(format!("cannot start the watch thread: {e}")))
}

fn path(folder: &Path, slot: SlotKind) -> PathBuf {
    folder.join(slot.as_str()).with_extension("wasm")
}

fn watch(host: &Weak<PolicyHost>, folder: &Path, mut loaded: [Stamp; 4]) {
    let mut last: [Stamp; 4] = [None; 4];
    while let Some(host) = host.upgrade() {
        for (i, slot) in SlotKind::ALL.into_iter().enumerate() {
            let now = stamp(&path(folder, slot));
            // A file that is still being written changes between two looks. One that appears while the slot is paused is
            // loaded when that is over.
            if now.is_some() && now == last[i] && now != loaded[i] && !host.is_paused(slot) {
                loaded[i] = now;
                load(&host, slot, path(folder, slot));
            }
            last[i] = now;
        }
        drop(host);
        std::thread::sleep(PERIOD);
    }
}

fn load(host: &PolicyHost, slot: SlotKind, path: PathBuf) {
    match host.load_watched(slot, Source::File(path.clone())) {
        Ok(status) => {
            tracing::info!(%slot, name = status.name, path = %path.display(), "policy loaded from the watched folder");
        }
        Err(error) => {
            tracing::warn!(%slot, path = %path.display(), %error, "policy in the watched folder refused");
            host.log(slot, &error.to_string());
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let of = |path: &Path| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.len(), metadata.modified().ok()?))
    };
    Some((of(path)?, of(&beside(path))))
}
