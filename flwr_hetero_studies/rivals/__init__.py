"""Published methods that ours are raced against, for studies."""

from flwr_hetero_studies.rivals.adacomm import AdaComm
from flwr_hetero_studies.rivals.deadline import DeadlineSelection
from flwr_hetero_studies.rivals.fedasync import FedAsync
from flwr_hetero_studies.rivals.fedat import FedAT
from flwr_hetero_studies.rivals.fedcompass import FedCompass
from flwr_hetero_studies.rivals.fednova import FedNova
from flwr_hetero_studies.rivals.oort import Oort
from flwr_hetero_studies.rivals.over_select import OverSelect
from flwr_hetero_studies.rivals.power_of_choice import PowerOfChoice
from flwr_hetero_studies.rivals.rescaled import RescaledASGD
from flwr_hetero_studies.rivals.ringleader import RingleaderASGD
from flwr_hetero_studies.rivals.without_slowest import WithoutSlowest

__all__ = ["AdaComm", "DeadlineSelection", "FedAT", "FedAsync", "FedCompass", "FedNova", "Oort",
           "OverSelect", "PowerOfChoice", "RescaledASGD", "RingleaderASGD",
           "WithoutSlowest"]  # fmt: skip
