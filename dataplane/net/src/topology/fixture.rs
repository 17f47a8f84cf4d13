//! Builds a sysfs in a temporary folder from text: one line per folder, then its attributes as `name=value` or
//! `name="value with spaces"`. The links by which the kernel makes devices findable follow from the paths.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;

pub const HGX: &str = include_str!("fixtures/hgx-8gpu-8nic.txt");
pub const TWO_SOCKETS: &str = include_str!("fixtures/2socket-4nic.txt");
pub const CLOUD_VM: &str = include_str!("fixtures/cloud-vm-1nic.txt");

pub fn build(text: &str) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for folder in ["class", "devices", "bus/pci/devices"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        add(root.path(), line);
    }
    root
}

/// Adds one line's folder, or changes the attributes of one that is there.
pub fn add(root: &Path, line: &str) {
    let (path, mut attributes) = line.split_once(' ').unwrap_or((line, ""));
    let folder = root.join(path);
    fs::create_dir_all(&folder).unwrap();
    while let Some((name, rest)) = attributes.split_once('=') {
        let (value, rest) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap(),
            None => rest.split_once(' ').unwrap_or((rest, "")),
        };
        match name {
            "physfn" => symlink(root.join(value), folder.join(name)).unwrap(),
            _ => fs::write(folder.join(name), format!("{value}\n")).unwrap(),
        }
        attributes = rest.trim_start();
    }
    link(root, Path::new(path));
}

/// Removes a device of a class: its folder and the link to it.
pub fn remove(root: &Path, class: &str, name: &str) {
    let link = root.join("class").join(class).join(name);
    fs::remove_dir_all(link.canonicalize().unwrap()).unwrap();
    fs::remove_file(link).unwrap();
}

fn link(root: &Path, path: &Path) {
    let mut above = path.to_owned();
    while let Some(name) = above.file_name().map(ToOwned::to_owned) {
        let device = root.join(&above);
        above.pop();
        let class = above.file_name().and_then(|class| class.to_str()).unwrap_or("");
        if ["net", "infiniband"].contains(&class) {
            fs::create_dir_all(root.join("class").join(class)).unwrap();
            let _ = symlink(&device, root.join("class").join(class).join(&name)); // there already: fine
            if !path.starts_with("devices/virtual") {
                let _ = symlink(root.join(above.parent().unwrap()), device.join("device"));
            }
        }
        if name.to_str().is_some_and(|name| name.contains('.')) {
            let _ = symlink(&device, root.join("bus/pci/devices").join(&name));
        }
    }
}
