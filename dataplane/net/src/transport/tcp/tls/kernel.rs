//! TLS in the kernel (`Documentation/networking/tls.rst` of Linux), where it has that: once both sides have shown their
//! certificates it gets the keys, and the connection is read and written as if it were plain, straight from and to memory.

use std::io::{self, IoSliceMut};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvasir_memory::shared::{self, Shared};
use kvasir_os::net::{self, TcpListener, TcpStream};
use kvasir_os::time::Duration;
use nix::errno::Errno;
use nix::sys::socket::sockopt::{TcpTlsRx, TcpTlsTx, TcpUlp, TlsCryptoInfo};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, TlsGetRecordType, recvmsg, setsockopt};
use rustls::{AlertDescription, CipherSuite, Connection, ConnectionTrafficSecrets};

use super::RECORD;

/// What one key may encrypt, in records: as rustls has it for this cipher (RFC 8446, section 5.5). The kernel does not count, and
/// most kernels take no second key. Connections are replaced long before.
const RECORDS_MAX: u64 = 1 << 24;

/// The only cipher that is handed over: the one that two nodes choose.
const CIPHER: CipherSuite = CipherSuite::TLS13_AES_256_GCM_SHA384;

/// The kernel's side of one connection.
pub(in crate::transport::tcp) struct Kernel {
    /// How many records it has encrypted at most.
    records: AtomicU64,
}

/// Whether the kernel takes this connection over, which has shaken hands. Not one that the peer has closed already: what it said last
/// is read without the kernel.
pub(in crate::transport::tcp) fn takes(connection: &Connection, stream: &TcpStream) -> bool {
    let suite = connection.negotiated_cipher_suite();
    suite.is_some_and(|suite| suite.suite() == CIPHER) && encrypts() && prepare(stream).is_ok()
}

/// Whether this kernel encrypts. It is tried out once, as the keys of a connection cannot be had back.
fn encrypts() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    let tried = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let stream = net::connect_from(None, listener.local_addr()?, Duration::from_secs(1))?;
        prepare(&stream)?;
        let keys = crypto_info([0; 32], [0; 12], 0);
        hand_over(&stream, &keys, &keys)
    };
    *ANSWER.get_or_init(|| tried().is_ok())
}

impl Kernel {
    /// Hands a connection over that the kernel [`takes`], and of which nothing was read or written yet but the handshake.
    pub(in crate::transport::tcp) fn take_over(
        connection: Connection,
        stream: &TcpStream,
    ) -> io::Result<Self> {
        let secrets = connection.dangerous_extract_secrets().map_err(io::Error::other)?;
        let (sends, receives) = (info_of(secrets.tx)?, info_of(secrets.rx)?);
        hand_over(stream, &sends, &receives)?;
        Ok(Self { records: AtomicU64::new(0) })
    }

    pub(in crate::transport::tcp) fn send(
        &self,
        stream: &TcpStream,
        parts: &[Shared<'_>],
    ) -> io::Result<usize> {
        if self.records.load(Relaxed) >= RECORDS_MAX {
            return Err(io::Error::other("its key has encrypted as much as one key may"));
        }
        let sent = shared::send(stream.as_fd(), parts)?;
        // Each call may end one that the call before began, and leaves one that is not full.
        self.records.fetch_add((sent / RECORD) as u64 + 2, Relaxed);
        Ok(sent)
    }
}

/// What an error of a read means: the kernel returns nothing but data, and stops at all else.
pub(in crate::transport::tcp) fn explain(error: io::Error, stream: &TcpStream) -> io::Error {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EIO) => said_instead(stream).unwrap_or(error),
        Some(Errno::EBADMSG) => {
            let reason = "what came was encrypted with other keys, or changed on its way";
            io::Error::new(io::ErrorKind::InvalidData, reason)
        }
        _ => error,
    }
}

/// What the peer says in a record that is not data.
fn said_instead(stream: &TcpStream) -> nix::Result<io::Error> {
    let (mut bytes, mut space) = ([0; 64], nix::cmsg_space!(u8));
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let got =
        recvmsg::<()>(stream.as_fd().as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_DONTWAIT)?;
    let kind = got.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::TlsGetRecordType(kind) => Some(kind),
        _ => None,
    });
    let count = got.bytes;
    Ok(match (kind, &bytes[..count]) {
        (Some(TlsGetRecordType::Alert), &[_, description]) => match AlertDescription::from(description) {
            AlertDescription::CloseNotify => io::ErrorKind::UnexpectedEof.into(),
            alert => io::Error::new(io::ErrorKind::InvalidData, rustls::Error::AlertReceived(alert)),
        },
        (Some(TlsGetRecordType::Handshake), _) => io::Error::new(
            io::ErrorKind::InvalidData,
            "the peer has changed its keys, which kernels do not follow",
        ),
        _ => io::Error::new(io::ErrorKind::InvalidData, "the peer sent a record of no known kind"),
    })
}

/// Bytes pass as they are until there are keys.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    Ok(setsockopt(stream, TcpUlp::default(), b"tls")?)
}

fn hand_over(stream: &TcpStream, sends: &TlsCryptoInfo, receives: &TlsCryptoInfo) -> io::Result<()> {
    setsockopt(stream, TcpTlsTx, sends)?;
    setsockopt(stream, TcpTlsRx, receives)?;
    Ok(())
}

fn info_of((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> io::Result<TlsCryptoInfo> {
    let other = || io::Error::other("these are the keys of another cipher");
    let ConnectionTrafficSecrets::Aes256Gcm { key, iv } = secrets else { return Err(other()) };
    let key = key.as_ref().try_into().map_err(|_| other())?;
    let iv = iv.as_ref().try_into().map_err(|_| other())?;
    Ok(crypto_info(key, iv, sequence))
}

/// A key, and the nonce of the record with number 0, of which the kernel has the first bytes apart.
fn crypto_info(key: [u8; 32], nonce: [u8; 12], sequence: u64) -> TlsCryptoInfo {
    let [s0, s1, s2, s3, iv @ ..] = nonce;
    TlsCryptoInfo::Aes256Gcm(libc::tls12_crypto_info_aes_gcm_256 {
        info: libc::tls_crypto_info {
            version: libc::TLS_1_3_VERSION,
            cipher_type: libc::TLS_CIPHER_AES_GCM_256,
        },
        iv,
        key,
        salt: [s0, s1, s2, s3],
        rec_seq: sequence.to_be_bytes(),
    })
}
