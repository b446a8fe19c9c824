//! Passthrough for a daemon without CAP_SYS_ADMIN.
//!
//! The kernel takes a backing file (FUSE_DEV_IOC_BACKING_OPEN) only from a caller with CAP_SYS_ADMIN. So a daemon of an
//! ordinary user sends its connection and the file to a [`helper`], which checks both and makes the call. [`Client`] is
//! the daemon's side. The helper is killed, stopped or absent: then the daemon serves the file, as it always can.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recvmsg, sendmsg, socketpair,
};

pub mod helper;

/// Asks for a backing file. It comes with the connection and the file.
const OPEN: u8 = 0;
/// Gives a backing file up. It comes with the connection, and the file's number.
const CLOSE: u8 = 1;
/// Bytes of a request: what is asked for, and a backing file's number in little-endian order.
const REQUEST: usize = 5;
/// Bytes of an answer: a number, or a negative errno, in little-endian order. The first one says that the helper is
/// ready.
const ANSWER: usize = 4;
/// Descriptors that a request has at most. The buffer has room for one more, so that a third is noticed.
const DESCRIPTORS: usize = 2;
/// A helper that does not answer for so long is given up. It takes some 50 microseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// A helper, as the daemon sees it.
#[derive(Debug)]
pub struct Client {
    /// `None` once the helper has failed to answer: an answer that comes late must not be taken for the next one.
    /// Taken by threads that open or release files, which hold no other lock.
    socket: Mutex<Option<OwnedFd>>,
    /// The helper, if this process started it. It ends when the socket is closed.
    child: Option<Mutex<Child>>,
}

impl Client {
    /// Starts the helper `program`, and waits until it is ready.
    ///
    /// # Errors
    /// It cannot be started, or it has no CAP_SYS_ADMIN.
    pub fn start(program: &Path) -> io::Result<Client> {
        let (ours, theirs) = pair()?;
        let child = Command::new(program).env_clear().stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn()?;
        let client = Client { socket: Mutex::new(None), child: Some(Mutex::new(child)) };
        client.adopt(ours)
    }

    /// A helper that somebody else has started, at the other end of `socket`. Waits until it is ready.
    ///
    /// # Errors
    /// It does not answer, or has no CAP_SYS_ADMIN.
    pub fn over(socket: OwnedFd) -> io::Result<Client> {
        Client { socket: Mutex::new(None), child: None }.adopt(socket)
    }

    fn adopt(mut self, socket: OwnedFd) -> io::Result<Client> {
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
        answer(&socket)?;
        *self.socket.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(socket);
        Ok(self)
    }

    /// Registers a file with the kernel; returns its number, for the answer to an open.
    ///
    /// # Errors
    /// EACCES: the helper refuses this file. EPIPE: the helper is gone, or has not answered. Else the kernel's error.
    pub fn open(&self, connection: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<u32> {
        self.ask(OPEN, 0, &[connection, file])
    }

    /// Gives a registered file up. Files that are open through it stay usable.
    ///
    /// # Errors
    /// Those of [`Client::open`]. The kernel then keeps the file until the unmount.
    pub fn close(&self, connection: BorrowedFd<'_>, number: u32) -> io::Result<()> {
        self.ask(CLOSE, number, &[connection]).map(drop)
    }

    /// False once a helper is gone, or has not answered. Files are served by the daemon from then on.
    pub fn is_alive(&self) -> bool {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn ask(&self, what: u8, number: u32, descriptors: &[BorrowedFd<'_>]) -> io::Result<u32> {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = socket.as_ref() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let mut request = [what; REQUEST];
        request[1..].copy_from_slice(&number.to_le_bytes());
        let answer = send(open, &request, descriptors).and_then(|()| receive_answer(open));
        match answer {
            Ok(answer) => to_result(answer),
            Err(error) => {
                *socket = None;
                Err(io::Error::new(
                    io::ErrorKind::BrokenPipe,
                    format!("the passthrough helper does not answer: {error}"),
                ))
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        *self.socket.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
        let Some(child) = self.child.as_mut() else { return };
        let child = child.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A stopped helper does not see that the socket is closed.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// The two ends of a connection between a daemon and its helper.
///
/// # Errors
/// The process has too many open files.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut extra = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        extra.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    rustix::io::retry_on_intr(|| sendmsg(socket, &[io::IoSlice::new(bytes)], &mut extra, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// A helper's answer; an answer of another length, or none, is an error.
fn receive_answer(socket: &OwnedFd) -> io::Result<i32> {
    let mut bytes = [0; ANSWER];
    let mut none = RecvAncillaryBuffer::default();
    let into = &mut [io::IoSliceMut::new(&mut bytes)];
    let got = rustix::io::retry_on_intr(|| recvmsg(socket.as_fd(), into, &mut none, RecvFlags::empty()))?;
    match got.bytes {
        ANSWER => Ok(i32::from_le_bytes(bytes)),
        0 => Err(io::Error::new(io::ErrorKind::BrokenPipe, "it has ended")),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn to_result(answer: i32) -> io::Result<u32> {
    u32::try_from(answer).map_err(|_| io::Error::from_raw_os_error(-answer))
}

fn answer(socket: &OwnedFd) -> io::Result<u32> {
    receive_answer(socket).and_then(to_result)
}
