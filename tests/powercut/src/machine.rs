//! The virtual machine's devices: `/dev/ram0` is recorded to `/dev/ram1`, and power cuts are replayed onto `/dev/ram2`.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::log::{self, Entry};
use crate::work::MARK_BYTES;

/// The file system; marks follow it.
pub(crate) const IMAGE_BYTES: usize = 24 << 20;
const SECTOR: usize = 512;
const DISK: &str = "/dev/ram0";
const LOG: &str = "/dev/ram1";
const REPLAY: &str = "/dev/ram2";
/// What is made of it. Without udev, the kernel's own names are those that are there.
const RECORDED: &str = "/dev/dm-0";
const IN_TURN: &str = "/dev/dm-1";

/// A mounted file system, until it is dropped.
pub(crate) struct Mounted {
    pub(crate) folder: PathBuf,
}

impl Mounted {
    pub(crate) fn new(device: &Path, folder: &str) -> Result<Self> {
        fs::create_dir_all(folder)?;
        run(Command::new("mount").args(["-t", "ext4"]).arg(device).arg(folder))?;
        Ok(Self { folder: folder.into() })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A killed process' last requests may still hold it.
        for _ in 0..50 {
            if run(Command::new("umount").arg(&self.folder)).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        eprintln!("{} cannot be unmounted", self.folder.display());
    }
}

/// An empty file system.
pub(crate) fn format() -> Result<Vec<u8>> {
    let blocks = (IMAGE_BYTES / 4096).to_string();
    run(Command::new("mkfs.ext4").args(["-q", "-F", "-b", "4096", "-J", "size=4", DISK]).arg(blocks))?;
    read_image()
}

/// A log, and what the recorded device had in the end.
pub(crate) type Recorded = (Vec<Entry>, Vec<u8>);

/// Records what `work` does to a file system that begins as `image`. It is given the folder, the device and where marks go.
pub(crate) fn record(image: &[u8], work: impl FnOnce(&Path, &Path, u64) -> Result<()>) -> Result<Recorded> {
    fill(DISK, image)?;
    let sectors = (IMAGE_BYTES + MARK_BYTES) / SECTOR;
    mapped("powercut", &format!("0 {sectors} log-writes {DISK} {LOG}"), || {
        // One flush after the other. `dm-log-writes` logs a flush when it ends, with the writes that had ended when it began. If
        // another flush overtakes it, then these stand behind that one, which covered them, and behind later writes to their place.
        let one_by_one = format!("0 {sectors} delay {RECORDED} 0 0 {RECORDED} 0 0 {RECORDED} 0 1");
        mapped("powercut-flushes", &one_by_one, || {
            let mounted = Mounted::new(Path::new(IN_TURN), "/recorded")?;
            work(&mounted.folder, Path::new(IN_TURN), IMAGE_BYTES as u64)
        })
    })?;
    Ok((log::read(File::open(LOG).context(LOG)?)?, read_image()?))
}

/// The device mapper has this device while `work` is done.
fn mapped(name: &str, table: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    run(Command::new("dmsetup").args(["create", name, "--noudevsync", "--table", table]))?;
    let done = work();
    run(Command::new("dmsetup").args(["remove", "--noudevsync", name]))?;
    done
}

fn read_image() -> Result<Vec<u8>> {
    let mut image = vec![0; IMAGE_BYTES];
    File::open(DISK).and_then(|mut disk| disk.read_exact(&mut image)).context(DISK)?;
    Ok(image)
}

/// The file system of a machine whose power was cut, mounted.
pub(crate) fn replay(image: &[u8]) -> Result<Mounted> {
    fill(REPLAY, image)?;
    Mounted::new(Path::new(REPLAY), "/replayed")
        .with_context(|| format!("the file system does not mount; the kernel says {}", said_last()))
}

/// The end of the kernel's log.
fn said_last() -> String {
    let log = Command::new("busybox").arg("dmesg").output();
    let log =
        log.map_or_else(|error| error.to_string(), |log| String::from_utf8_lossy(&log.stdout).into_owned());
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(3)..].join("; ")
}

fn fill(device: &str, image: &[u8]) -> Result<()> {
    let file = OpenOptions::new().write(true).open(device);
    let filled = file.and_then(|mut file| file.write_all(image).and_then(|()| file.sync_all()));
    filled.with_context(|| device.to_owned())
}

fn run(command: &mut Command) -> Result<()> {
    let done = command.output().with_context(|| format!("{command:?} does not start"))?;
    ensure!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}
