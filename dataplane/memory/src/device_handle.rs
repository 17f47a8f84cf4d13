//! How another process opens memory of a GPU, as bytes.

/// Bytes of a handle as the driver gives it.
pub const RAW: usize = 64;
/// Bytes of a [`MemoryHandle`] on its way to another process.
pub const MEMORY_HANDLE_LEN: usize = RAW + 8;

/// A right to memory of a GPU, to be sent to another process. It is worth nothing once that memory is freed.
///
/// As bytes it is the driver's handle of the allocation (`cudaIpcMemHandle_t`, 64 bytes) and where in the allocation the
/// memory begins (64 bits, little endian), which an engine can write without this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryHandle {
    /// Names a whole allocation of the driver.
    pub raw: [u8; RAW],
    /// Where in it the memory begins.
    pub offset: u64,
}

impl MemoryHandle {
    pub fn encode(&self) -> [u8; MEMORY_HANDLE_LEN] {
        let mut bytes = [0; MEMORY_HANDLE_LEN];
        bytes[..RAW].copy_from_slice(&self.raw);
        bytes[RAW..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; MEMORY_HANDLE_LEN]) -> Self {
        let (mut raw, mut offset) = ([0; RAW], [0; 8]);
        raw.copy_from_slice(&bytes[..RAW]);
        offset.copy_from_slice(&bytes[RAW..]);
        Self { raw, offset: u64::from_le_bytes(offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_travel_as_bytes() {
        let handle = MemoryHandle { raw: std::array::from_fn(|i| i as u8), offset: 0x0102_0304 };
        assert_eq!(MemoryHandle::decode(&handle.encode()), handle);
    }
}
