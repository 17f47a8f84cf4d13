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
const MAPPED: &str = "powercut";

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
    let mut image = vec![0; IMAGE_BYTES];
    File::open(DISK).and_then(|mut disk| disk.read_exact(&mut image)).context(DISK)?;
    Ok(image)
}

/// Records what `work` does to a file system that begins as `image`. It is given the folder, the device and where marks go.
pub(crate) fn record(image: &[u8], work: impl FnOnce(&Path, &Path, u64) -> Result<()>) -> Result<Vec<Entry>> {
    fill(DISK, image)?;
    let sectors = (IMAGE_BYTES + MARK_BYTES) / SECTOR;
    let table = format!("0 {sectors} log-writes {DISK} {LOG}");
    run(Command::new("dmsetup").args(["create", MAPPED, "--noudevsync", "--table", &table]))?;
    let recorded = within_map(work);
    run(Command::new("dmsetup").args(["remove", "--noudevsync", MAPPED]))?;
    recorded?;
    log::read(File::open(LOG).context(LOG)?)
}

fn within_map(work: impl FnOnce(&Path, &Path, u64) -> Result<()>) -> Result<()> {
    // Without udev, the kernel's own name is the one that is there.
    let device = Path::new("/dev/dm-0");
    let mounted = Mounted::new(device, "/recorded")?;
    work(&mounted.folder, device, IMAGE_BYTES as u64)
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
