//! Calls of the conductor in a stream: many for the price of one.

use super::conductor::ConductorService;
use super::stop_signal;
use kvasir_proto::{self as proto, exchange_request, exchange_response};
use proto::exchange_request::call::Call;
use proto::exchange_response::answer::Answer;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt};
use tonic::{Status, Streaming};

/// The most calls of one message.
const CALLS_MAX: usize = 256;
/// A caller is looked at once, when it opens its stream, so no stream lasts much longer.
const LASTS: Duration = Duration::from_secs(60);

pub(super) type Exchange = Pin<Box<dyn Stream<Item = Result<proto::ExchangeResponse, Status>> + Send>>;

/// A stream that is cut off between two messages.
pub(super) struct Until<S> {
    stream: S,
    end: Pin<Box<dyn Future<Output = ()> + Send>>,
    over: bool,
}

/// The calls, until the stream has lasted long enough or the host stops.
pub(super) fn until_its_end(
    calls: Streaming<proto::ExchangeRequest>,
    stopping: &watch::Receiver<bool>,
) -> Until<Streaming<proto::ExchangeRequest>> {
    let stopped = stop_signal(stopping);
    let end = Box::pin(async {
        let _ = tokio::time::timeout(LASTS, stopped).await;
    });
    Until { stream: calls, end, over: false }
}

impl<S: Stream + Unpin> Stream for Until<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        if self.over || self.end.as_mut().poll(cx).is_ready() {
            self.over = true;
            return Poll::Ready(None);
        }
        Pin::new(&mut self.stream).poll_next(cx)
    }
}

/// Answers message after message; the next is read when the caller has taken the last answer.
pub(super) fn answers(
    service: ConductorService,
    only_tenant: Option<u16>,
    messages: impl Stream<Item = Result<proto::ExchangeRequest, Status>> + Send + 'static,
) -> Exchange {
    Box::pin(messages.then(move |message| {
        let service = service.clone();
        async move {
            let calls = message?.calls;
            if calls.is_empty() || calls.len() > CALLS_MAX {
                let why = format!("calls: there are {}; must be 1 to {CALLS_MAX}", calls.len());
                return Err(Status::invalid_argument(why));
            }
            let mut answers = Vec::with_capacity(calls.len());
            for call in calls {
                let answer = answer(&service, only_tenant, call).await.unwrap_or_else(refusal);
                answers.push(exchange_response::Answer { answer: Some(answer) });
            }
            Ok(proto::ExchangeResponse { answers })
        }
    }))
}

async fn answer(
    service: &ConductorService,
    only_tenant: Option<u16>,
    call: exchange_request::Call,
) -> Result<Answer, Status> {
    match call.call {
        Some(Call::Schedule(request)) => service.decide(only_tenant, request).await.map(Answer::Scheduled),
        Some(Call::Complete(request)) => service.reached(&request).map(Answer::Completed),
        None => Err(Status::invalid_argument("calls: one is neither schedule nor complete")),
    }
}

fn refusal(status: Status) -> Answer {
    let (code, message) = (i32::from(status.code()), status.message().to_owned());
    Answer::Refusal(exchange_response::Refusal { code, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_ends_between_two_messages_when_its_time_is_over() {
        let (send, calls) = tokio::sync::mpsc::channel(4);
        let stream = tokio_stream::wrappers::ReceiverStream::new(calls);
        let (over, end) = tokio::sync::oneshot::channel::<()>();
        let mut until = Until { stream, end: Box::pin(async { drop(end.await) }), over: false };
        send.send(1).await.unwrap();
        send.send(2).await.unwrap();
        assert_eq!(until.next().await, Some(1));
        over.send(()).unwrap();
        assert_eq!(until.next().await, None, "what was not taken is not done");
    }
}
