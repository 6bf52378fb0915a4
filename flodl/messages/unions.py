"""Who may say what to whom: a message of another union on a connection is a protocol error."""

from typing import TypeAlias

from flodl.messages.controller import (
    AbortRound,
    Admitted,
    BootstrapGiven,
    CloseRound,
    CloseWindow,
    Commit,
    Declined,
    DescribeSum,
    DrainAccepted,
    EpochReport,
    EvalReport,
    Evict,
    FinishRank,
    FormGroup,
    Heard,
    JudgeRound,
    KillRank,
    LoadState,
    OpenRound,
    PickPort,
    RunCallback,
    RunEnded,
    RunEval,
    SendState,
    SpawnRanks,
    StartAccepted,
    StartRound,
    StopAccepted,
    StopHost,
    StopRanks,
    StoreReply,
    WindowPlan,
)
from flodl.messages.daemon import (
    Beat,
    HostHello,
    HostStopped,
    LeaveWanted,
    LogChunk,
    PortPicked,
    RankExited,
    ReduceSlice,
    ResultReady,
    StopWanted,
)
from flodl.messages.handshake import Answer, Challenge, Hello, Refused, Welcome
from flodl.messages.head import AskBootstrap, DrainRequest, HeadError, HeadReady, RoundJudged, StartRequest, StopRequest
from flodl.messages.rank import (
    CallbackDone,
    ContributionWritten,
    EvalDone,
    GroupFormed,
    MinReached,
    RankAlive,
    RankError,
    RankFinished,
    RankHello,
    RankReady,
    RankSignalled,
    Reduced,
    SliceReduced,
    StateLoaded,
    StateSent,
    StoreRequest,
    SumDescribed,
    WindowDone,
)

FromRank: TypeAlias = (
    RankReady
    | RankError
    | StoreRequest
    | GroupFormed
    | MinReached
    | WindowDone
    | Reduced
    | SumDescribed
    | EvalDone
    | CallbackDone
    | StateSent
    | StateLoaded
    | RankFinished
)
RankToDaemon: TypeAlias = FromRank | RankHello | RankAlive | RankSignalled | ContributionWritten | SliceReduced
ToRank: TypeAlias = (
    Admitted
    | StoreReply
    | FormGroup
    | WindowPlan
    | CloseWindow
    | StartRound
    | DescribeSum
    | AbortRound
    | Commit
    | RunEval
    | RunCallback
    | SendState
    | LoadState
    | FinishRank
    | Evict
)
DaemonToRank: TypeAlias = ToRank | ReduceSlice | ResultReady
FromDaemon: TypeAlias = (
    HostHello | Beat | RankExited | LogChunk | HostStopped | StopWanted | LeaveWanted | PortPicked | FromRank
)
FromWalkIn: TypeAlias = FromDaemon | AskBootstrap
ToDaemon: TypeAlias = SpawnRanks | OpenRound | CloseRound | KillRank | Heard | StopHost | PickPort | StopRanks | ToRank
FromHead: TypeAlias = HeadReady | HeadError | StopRequest | RoundJudged
ToHead: TypeAlias = EpochReport | EvalReport | RunEnded | JudgeRound
FromClient: TypeAlias = StopRequest | StartRequest | DrainRequest | AskBootstrap
ToClient: TypeAlias = StopAccepted | StartAccepted | DrainAccepted | BootstrapGiven | Declined
Handshake: TypeAlias = Hello | Challenge | Answer | Welcome | Refused
Message: TypeAlias = (
    Handshake | RankToDaemon | DaemonToRank | FromDaemon | ToDaemon | FromHead | ToHead | FromClient | ToClient
)
