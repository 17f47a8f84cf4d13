//! The policy's log (`log.log`): a bounded, rate-limited ring at the host.

/// Something is wrong with this policy.
pub fn error(message: &str) {
    write(1, message);
}

/// Something looks wrong with its inputs.
pub fn warn(message: &str) {
    write(2, message);
}

/// Worth knowing.
pub fn info(message: &str) {
    write(3, message);
}

#[cfg(target_arch = "wasm32")]
fn write(level: u32, message: &str) {
    crate::bindings::log(level, message);
}

#[cfg(not(target_arch = "wasm32"))]
fn write(level: u32, message: &str) {
    eprintln!("policy log {level}: {message}");
}
